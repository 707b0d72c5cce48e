"""Others' clients of OpenAI's API, unchanged, against a running stack; see `make http-clients`.

They are installed into environments of their own: `CLIENTS` names the folder.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from flyspec.cli.stack import Stack, StackOptions

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("CLIENTS", "build/http-clients")).resolve()
PYTHON = FOLDER / "venv/bin/python"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def url():
    async with Stack(StackOptions(http_port=0)) as stack:
        yield stack.http_url


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
    where = f"{url}/openapi.json" if is_schema else url
    running = await asyncio.create_subprocess_exec(
        *map(str, command), where, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await running.communicate()
    print(said.decode()[-6000:])
    assert running.returncode == 0
