"""A stack with the HTTP API, and clients of it: OpenAI's own, and a bare one."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import openai
import pytest
import torch

from flyspec.security import ApiKey, Scope
from flyspec.security.keys import entry_of, new_key
from tests.orchestrator.stacks import start_stack

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def chat_dirs(model_dirs, tmp_path_factory):
    """The tiny models, the target with a chat template."""
    target = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(model_dirs[0], target)
    Path(target, "chat_template.jinja").write_text(TEMPLATE)
    return str(target), model_dirs[1]


@pytest.fixture(scope="session")
async def served(chat_dirs):
    torch.set_num_threads(1)
    async with start_stack(chat_dirs, http_port=0) as running:
        yield running


@pytest.fixture(scope="session")
async def keyed(chat_dirs, tmp_path_factory):
    """A stack with keys, and the keys by name."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    generate = frozenset({Scope.GENERATE})
    owners = [
        ApiKey("team", generate),
        ApiKey("operator", frozenset({Scope.ADMIN})),
        ApiKey("both", frozenset(Scope)),
        ApiKey("brief", generate, max_tokens_per_request=1),
        ApiKey("hasty", generate, max_requests_per_minute=1),
    ]
    keys = {owner.name: new_key() for owner in owners}
    entries = [entry_of(keys[owner.name], owner) for owner in owners]
    file.write_text("\n".join(entries))
    origins = "https://chat.example.com"
    async with start_stack(
        chat_dirs, http_port=0, api_keys_file=str(file), http_allowed_origins=origins
    ) as running:
        yield running, keys


@pytest.fixture(scope="session")
def url(served):
    return f"http://127.0.0.1:{served.http_port}"


@pytest.fixture
async def api(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def bare(url):
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        yield client
