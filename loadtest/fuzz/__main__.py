"""Does any message harm a server? `python -m loadtest.fuzz --server verify --seed 1`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal

import typer
import uvloop

from flyspec.cli.options import with_flags
from flyspec.flags import Flag
from loadtest.command import run, say, single
from loadtest.fuzz.report import FuzzResult, report_of
from loadtest.fuzz.run import FuzzRun
from loadtest.fuzz.run import fuzz as fuzz_server
from loadtest.fuzz.servers import bundled
from loadtest.fuzz.source import SERVICES
from loadtest.report.files import ReportFiles


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
        "Play only the script of this number, and print what comes of it.", min=0,
    )] = None
    # fmt: on

    @property
    def servers(self) -> list[str]:
        """Names of the servers to attack."""
        return list(SERVICES) if self.server == "all" else [self.server]


@with_flags
def fuzz(
    options: FuzzOptions,
    files: ReportFiles,
) -> None:
    """Send invalid and abandoned calls to flyspec's servers, many at once; none may be harmed.

    Starts the stack with the bundled models and attacks one server after the other. The exit code
    is 1 if a server answers with a status that blames itself (INTERNAL, UNKNOWN, ...), accepts a
    mistake, does not answer, dies, leaks memory or sessions, gives another session wrong tokens, or
    logs a traceback. The report has the smallest call that shows it, and the seed.
    """
    if options.only is not None:
        uvloop.run(_play(options, options.only))
        return
    files.validate()
    results = uvloop.run(_fuzz(options))
    raise typer.Exit(files.finish(report_of(results, asdict(options))))


async def _fuzz(options: FuzzOptions) -> list[FuzzResult]:
    return [
        await fuzz_server(partial(bundled, name), options.num_messages, options.seed, say)
        for name in options.servers
    ]


async def _play(options: FuzzOptions, number: int) -> None:
    """Play one script against fresh servers and print what comes of it."""
    for name in options.servers:
        log: list[str] = []
        async with bundled(name, log.append) as server:
            fuzzing = FuzzRun(server, options.seed, log, say)
            outcome = await fuzzing.alone(fuzzing.script(number))
        print(outcome.script)
        print(f"{outcome.status}: {outcome.details}; {outcome.complaint or 'as expected'}")
        print("\n".join(log))


if __name__ == "__main__":
    run(single(fuzz))
