"""The wheel as users install it: a new environment outside the checkout, and the README's examples.

`make wheel-test` runs these; they need pip's and npm's registries.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "demo/models"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
STARTING_S = 120
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


def run(*command, cwd) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=ENVIRONMENT, text=True, capture_output=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="module")
def installed(folder):
    """The programs of an environment with the wheel, OpenAI's package, and mypy."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("flyspec-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv/bin"
    run(
        programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt",
        f"{wheel}[http,models]", "openai", "mypy", cwd=folder,
    )  # fmt: skip
    return programs


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def ports(installed, folder):
    """The ports of a stack started from the wheel, by those that the README has."""
    found = {"50050": str(free_port()), "8000": str(free_port())}
    with (folder / "serve.log").open("w") as log:
        where = ["--port", found["50050"], "--http-port", found["8000"]]
        for inner in ("admin", "draft", "verify"):
            where += [f"--{inner}-port", "0"]
        models = "--model", MODELS / "target", "--draft-model", MODELS / "draft"
        serving = subprocess.Popen(
            [installed / "flyspec", "serve", *where, *models],
            cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until = time.monotonic() + STARTING_S
        while not is_healthy(found["8000"]):
            assert serving.poll() is None, (folder / "serve.log").read_text()
            assert time.monotonic() < until, (folder / "serve.log").read_text()
            time.sleep(0.2)
        yield found
    finally:
        serving.terminate()
        assert serving.wait(60) is not None


def is_healthy(port: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def examples(language: str) -> list[str]:
    """Return the README's blocks of a language."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    return found


def at(ports: dict[str, str], example: str) -> str:
    for theirs, ours in ports.items():
        example = example.replace(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}")
    return example


def test_nothing_of_the_checkout_is_imported(installed, folder):
    where = run(installed / "python", "-c", "import flyspec; print(flyspec.__file__)", cwd=folder)
    assert where.startswith(str(folder))


@pytest.mark.parametrize("example", examples("python"))
def test_python(installed, folder, ports, example):
    (folder / "example.py").write_text(at(ports, example))
    assert run(installed / "python", "example.py", cwd=folder).strip()
    run(installed / "mypy", "--strict", "example.py", cwd=folder)


@pytest.mark.parametrize("example", examples("javascript"))
def test_node(folder, ports, example):
    (folder / "example.mjs").write_text(at(ports, example))
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "openai", cwd=folder)
    assert run("node", "example.mjs", cwd=folder).strip()


def test_curl(folder, ports):
    (example,) = re.findall(r"^    (curl .*?'\n)", (ROOT / "README.md").read_text(), re.M | re.S)
    command = shlex.split(at(ports, example).replace("\\\n", ""))
    assert '"assistant"' in run(*command, cwd=folder)


def test_a_program_with_both_clients_is_typed(installed, folder):
    (folder / "both.py").write_text(USER)
    run(installed / "mypy", "--strict", "both.py", cwd=folder)
    (folder / "wrong.py").write_text("from flyspec import Client\nClient().complete(3, seed='x')\n")
    wrong = subprocess.run(
        [installed / "mypy", "--strict", "wrong.py"], cwd=folder, text=True, capture_output=True
    )
    assert 'incompatible type "int"' in wrong.stdout
    assert 'incompatible type "str"' in wrong.stdout


USER = """
import asyncio

from flyspec import AsyncClient, Client
from flyspec.client import Chunk, Generation


def blocking() -> Generation:
    with Client("127.0.0.1:50050") as client:
        for event in client.generate([{"role": "user", "content": "Hi"}], rule="exact", seed=1):
            if isinstance(event, Chunk):
                print(event.text, event.origins)
        return client.complete("def f():", stop=["\\\\n\\\\n"], logprobs=2, temperature=0.5)


async def concurrent() -> list[str]:
    async with AsyncClient("127.0.0.1:50050") as client:
        found = await asyncio.gather(*(client.complete([1, 2, n], max_tokens=4) for n in range(3)))
        return [generation.text for generation in found]
"""
