"""Ctrl-C prints what was reached, and exits with 130."""

from __future__ import annotations

import asyncio
import json
import re
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


async def test_eval_and_bench_show_what_they_measured(stack: Stack, tmp_path: Path) -> None:
    for command, key in (("bench", "groups"), ("eval", "conditions")):
        output = tmp_path / (f"{command}.json" if command == "bench" else "run")
        file = output if command == "bench" else output / "report.json"
        flags = ["--repeats", "10000"] if command == "bench" else ["--problems", "5000"]
        problems = ["--problems", "2"] if command == "bench" else ["--concurrency", "2"]
        process = await start(
            command, "--address", stack.address, *flags, *problems, "--max-tokens", "4",
            "--rules", "exact", "--output", str(output),
        )  # fmt: skip
        assert process.stderr is not None
        async with asyncio.timeout(120):
            while b" of " not in (line := await process.stderr.readline()):
                assert line, "it ended"
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert process.returncode == 130, err
        assert b"exact" in out
        assert b"interrupted" in err
        assert json.loads(file.read_text())[key]


@pytest.mark.full
async def test_bench_pair_shows_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    flags = "--problems 1 --max-tokens 24 --repeats 10000 --rules exact"
    process = await start("bench", "pair", *flags.split(), "--output", str(file))
    assert process.stderr is not None
    async with asyncio.timeout(200):
        while not re.search(rb": ([2-9]|\d{2,}) of ", line := await process.stderr.readline()):
            assert line, "it ended"
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err
    assert out
    assert b"interrupted; these are the results until then" in err
    assert json.loads(file.read_text())
