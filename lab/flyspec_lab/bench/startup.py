"""How long `flyspec generate --local` takes to its first token, beside a bare import.

The bare import is what any program with the same models pays first: torch, and transformers' Llama.
Both run in new processes, in turn, so that they meet the same machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from flyspec.concurrency import UntilCtrlC
from flyspec.errors import FlyspecError

BARE_IMPORT = "import torch; from transformers import LlamaForCausalLM; print('imported')"
PROMPT = "def fibonacci(n):"


@dataclass(frozen=True)
class ProcessStart:
    """A process: seconds until its first output, and until its end; CPU seconds in all.

    CPU seconds include those of the processes that it started.
    """

    first_output_s: float
    seconds: float
    cpu_s: float


Pair = tuple[ProcessStart, ProcessStart]
"""The bare import, and `generate --local`."""


@dataclass(frozen=True)
class StartupReport:
    """Medians over runs; `ratio` and `cpu_ratio` are medians over pairs of neighbours."""

    runs: int
    bare_s: float
    first_token_s: float
    ratio: float
    bare_cpu_s: float
    generate_cpu_s: float
    cpu_ratio: float


def run(command: Sequence[str]) -> ProcessStart:
    """Run a command. Raises `FlyspecError` if it fails or prints nothing."""
    began = perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_output_s = perf_counter() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not first:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise FlyspecError(f"`{' '.join(command)}` failed: {said[-1000:]}")
    return ProcessStart(first_output_s, perf_counter() - began, usage.ru_utime + usage.ru_stime)


def measure(
    flags: Sequence[str], repeats: int, step: Callable[[], None] = lambda: None
) -> list[Pair]:
    """Return pairs of starts: the bare import, and `generate --local` with flags for its stack.

    Both run once before, so that files are in the page cache. `step` is called after each pair.
    Raises `StoppedEarly` with the pairs until then if Ctrl-C was pressed after one that counts.
    """
    bare = [sys.executable, "-c", BARE_IMPORT]
    generate = [
        sys.executable, "-m", "flyspec.cli", "generate", "--local", *flags,
        "--max-tokens", "8", "--color", "never", PROMPT,
    ]  # fmt: skip
    pairs = []
    with UntilCtrlC() as until:
        for _ in range(repeats + 1):
            pairs.append((run(bare), run(generate)))
            until.reached = len(pairs) > 1
            step()
    return until.result(pairs[1:])


def report(pairs: Sequence[Pair]) -> StartupReport:
    return StartupReport(
        len(pairs),
        statistics.median(bare.first_output_s for bare, _ in pairs),
        statistics.median(own.first_output_s for _, own in pairs),
        statistics.median(own.first_output_s / bare.first_output_s for bare, own in pairs),
        statistics.median(bare.cpu_s for bare, _ in pairs),
        statistics.median(own.cpu_s for _, own in pairs),
        statistics.median(own.cpu_s / bare.cpu_s for bare, own in pairs),
    )
