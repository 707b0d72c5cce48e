"""Ctrl-C prints what was reached, and exits with 130."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from flyspec.cli.stack import Stack
from tests.cli.processes import start


async def test_generate_says_what_it_reached(stack: Stack) -> None:
    prompts = ["generate", "--address", stack.address, "--ignore-eos", "--max-tokens", "220"]
    process = await start(*prompts, "The cat sat on the mat, and the dog")
    assert process.stdout is not None
    first = await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"stopped \xc2\xb7 " in err or b"length" in err  # it may have been too fast
    assert b"tokens/s" in err
    assert b"Traceback" not in err


@pytest.mark.slow
async def test_bench_shows_what_it_measured(stack: Stack, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    process = await start(
        "bench", "--address", stack.address, "--repeats", "10000", "--problems", "2",
        "--max-tokens", "4", "--rules", "exact", "--output", str(output),
    )  # fmt: skip
    assert process.stderr is not None
    async with asyncio.timeout(120):
        while b" of " not in (line := await process.stderr.readline()):
            assert line, "it ended"
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err
    assert b"exact" in out
    assert b"interrupted; these are the results until then" in err
    assert json.loads(output.read_text())["groups"]
