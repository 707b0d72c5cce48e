"""Does any message harm a server? `python -m loadtest.fuzz --server verify --seed 1`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal

import uvloop

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.flags import Flag
from flyspec_lab.report import PageResults, Report
from loadtest.fuzz.report import fuzz_report
from loadtest.fuzz.run import fuzz as fuzz_server
from loadtest.fuzz.servers import bundled
from loadtest.fuzz.source import SERVICES


# fmt: off
@dataclass(frozen=True)
class FuzzOptions:
    """What to attack, and how much."""

    server: Annotated[Literal["draft", "verify", "generation", "admin", "all"], Flag(
        "Server to attack.",
    )] = "all"
    num_messages: Annotated[int, Flag("Messages per server.", min=1)] = 200_000
    seed: Annotated[int, Flag("Random seed.")] = 0
    only: Annotated[int | None, Flag(
        "Number of a script to play alone, against a fresh server.", min=0,
    )] = None
    # fmt: on


@with_flags
def fuzz(
    options: FuzzOptions,
    results: PageResults,
) -> None:
    """Send invalid and abandoned calls to flyspec's servers, many at once; none may be harmed.

    Starts the stack with the bundled models and attacks one server after the other. The exit code
    is 1 if a server answers with a status that blames itself (INTERNAL, UNKNOWN, ...), accepts a
    mistake, does not answer, dies, leaks memory or sessions, gives another session wrong tokens, or
    logs a traceback. The report has the smallest call that shows it, and the seed.
    """
    results.of(lambda: uvloop.run(_fuzz(options)))


async def _fuzz(options: FuzzOptions) -> Report:
    results = []
    for name in SERVICES if options.server == "all" else [options.server]:
        start = partial(bundled, name)
        result = await fuzz_server(start, options.num_messages, options.seed, say, options.only)
        for check in result.checks():
            say(f"{check['name']}: {check['said']}")
        results.append(result)
    return fuzz_report(results, asdict(options))


if __name__ == "__main__":
    run(single(fuzz))
