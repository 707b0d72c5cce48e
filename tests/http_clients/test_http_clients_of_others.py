"""Others' clients of OpenAI's API, unchanged, against a running stack; see `make http-clients`.

They are installed into environments of their own: `CLIENTS` names the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from flyspec.bundled import TARGET
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AdminClient, Credentials
from flyspec.security.keys import ApiKey, Scope, entry_of, new_key
from flyspec_lab.word_problems import problems as word_problems

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("CLIENTS", "build/http-clients")).resolve()
PYTHON = FOLDER / "venv/bin/python"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def url():
    # Schemathesis also asks for many choices without a limit; a short context bounds them.
    async with Stack(StackOptions(http_port=0, max_model_len=512)) as stack:
        yield stack.http_url


@pytest.fixture(scope="module")
async def float32_url():
    async with Stack(StackOptions(http_port=0, dtype="float32")) as stack:
        yield stack.http_url


async def test_errors_in_node(tmp_path):
    own, operator = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        entry_of(own, ApiKey("team", frozenset({Scope.GENERATE}), max_requests_per_minute=20))
        + entry_of(operator, ApiKey("operator", frozenset({Scope.ADMIN})))
    )
    options = StackOptions(http_port=0, orchestrator_flags=("--api-keys-file", str(keys)))
    node = "node", FOLDER / "node_errors.mjs"
    async with (
        Stack(options) as stack,
        AdminClient(stack.admin_address, credentials=Credentials(api_key=operator)) as admin,
    ):
        await passes(*node, stack.http_url, own, "")
        await admin.drain()
        await passes(*node, stack.http_url, own, "draining")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([PYTHON, HERE / "with_langchain.py"], id="langchain"),
        pytest.param([PYTHON, HERE / "with_llama_index.py"], id="llama_index"),
        pytest.param(["node", FOLDER / "node.mjs"], id="node"),
        pytest.param(
            [FOLDER / "venv/bin/schemathesis", "run", "--max-examples", "50", "--seed", "1",
             "--checks", "not_a_server_error,content_type_conformance", "--max-time", "150",
             "--request-timeout", "120", "--suppress-health-check", "all"],
            id="schemathesis",
        ),
    ],
)  # fmt: skip
async def test_a_client(url, command):
    is_schema = "schemathesis" in str(command[0])
    await passes(*command, f"{url}/openapi.json" if is_schema else url)


async def test_lm_evaluation_harness(float32_url, tmp_path):
    problems = tmp_path / "problems.jsonl"
    with problems.open("w") as file:
        for problem in word_problems(7, 40, hard=True):
            row = {"question": problem.question, "answer": problem.solution}
            file.write(json.dumps(row) + "\n")
    await passes(PYTHON, HERE / "with_lm_eval.py", float32_url, TARGET, problems)


async def passes(*command):
    running = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await running.communicate()
    print(said.decode()[-6000:])
    assert running.returncode == 0
