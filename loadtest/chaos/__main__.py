"""`python -m loadtest.chaos`: faults under load."""

from __future__ import annotations

import asyncio

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec_lab.report import PageResults
from loadtest.chaos.run import run as run_chaos
from loadtest.chaos.work import ChaosOptions


@with_flags
def chaos(
    results: PageResults,
    options: ChaosOptions,
) -> None:
    """Inject faults into a fleet of services under load; every stream must go on.

    The fleet has one orchestrator, and behind proxies two targets, two drafters and one with
    another tokenizer. While requests of every kind are streamed, services are killed, drained,
    stopped, delayed, stalled and cut off at random, one at a time and all targets at once.

    With exact, every completed text must equal the one generated before the faults. With lossy
    rules, a fresh target judges every round again, and must reach the same decisions and text. No
    request may fail or exceed its deadline; at the end no session may be left, and every drafter
    must draft again. The exit code is 1 if any of this does not hold; --seed repeats a schedule.
    """
    results.of(lambda: asyncio.run(run_chaos(options, say)).report())


if __name__ == "__main__":
    run(single(chaos))
