"""The README's examples, as typed, with the wheel."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap

import pytest

from tests.wheel.user import ENVIRONMENT, ROOT, run

README = (ROOT / "README.md").read_text()


def examples(language: str) -> list[str]:
    """Return the README's blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def curl() -> list[str]:
    """Return the words of the README's first request by curl, which may go over several lines."""
    begin = re.search(r"^ *curl http.*/chat/completions", README, re.M).start()
    lines = README[begin:].splitlines()
    for count in range(1, len(lines)):
        try:
            return shlex.split(textwrap.dedent("\n".join(lines[:count])).replace("\\\n", ""))
        except ValueError:  # a quotation or a continued line is still open
            continue
    raise AssertionError("the README has no complete request by curl")


def test_the_readme_has_python():
    assert len(examples("python")) >= 2


@pytest.mark.parametrize("example", examples("python"))
def test_python(installed, tools, folder, served, example):
    (folder / "example.py").write_text(served.at(example))
    python = tools if "openai" in example else installed
    assert run(python / "python", "example.py", cwd=folder).strip()
    run(tools / "mypy", "--strict", "example.py", cwd=folder)


def test_curl(folder, served):
    assert '"assistant"' in run(*map(served.at, curl()), cwd=folder)


def test_a_program_with_both_clients_is_typed(installed, tools, folder):
    (folder / "both.py").write_text(USER)
    run(tools / "mypy", "--strict", "both.py", cwd=folder)
    (folder / "wrong.py").write_text("from flyspec import Client\nClient().complete(3, seed='x')\n")
    wrong = subprocess.run(
        [tools / "mypy", "--strict", "wrong.py"],
        cwd=folder, env=ENVIRONMENT, text=True, capture_output=True,
    )  # fmt: skip
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
