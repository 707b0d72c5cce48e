"""Does any message harm a server? `python -m loadtest.fuzz --server verify --seed 1`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

import grpc
import uvloop

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.flags import Flag
from flyspec.tables import FittedTable, make_table
from flyspec_lab.report import Report, Results
from loadtest.figures import Check
from loadtest.fuzz.bodies import attack
from loadtest.fuzz.run import FuzzRun
from loadtest.fuzz.sessions import FILES, LENGTH, PROMPT, SMALL
from loadtest.report import checked

CONTEXT, SESSIONS, IDLE_TIMEOUT_S = 256, 48, 20.0


# fmt: off
@dataclass(frozen=True)
class FuzzOptions:
    """The servers to attack, and the calls."""

    server: Annotated[Literal["draft", "verify", "generation", "admin", "http", "all"], Flag(
        "Server to attack; http: with large bodies.",
    )] = "all"
    num_calls: Annotated[int, Flag("Calls per server.", min=1)] = 60_000
    seed: Annotated[int, Flag("Random seed.")] = 0
    only: Annotated[int | None, Flag(
        "Number of a script (or body) to send alone, to a fresh server.", min=0,
    )] = None
    # fmt: on


@with_flags
def fuzz(options: FuzzOptions, results: Results) -> None:
    """Send invalid and abandoned calls to flyspec's servers, many at once; none may be harmed.

    Starts the stack with the bundled models and attacks one server after the other. The exit code
    is 1 if a server answers with a status that blames itself (INTERNAL, UNKNOWN, ...), accepts a
    mistake, does not answer, dies, leaks memory or sessions, gives another session wrong tokens, or
    logs a traceback. The report has the first call that shows it, and the seed. While large bodies
    are sent over HTTP, another client's stream may not be silent for 0.2 s longer.
    """
    results.of(lambda: uvloop.run(_fuzz(options)))


async def _fuzz(options: FuzzOptions) -> Report:
    checks, rows, tables = list[Check](), list[list[str]](), list[FittedTable]()
    for name in (*FILES, "http") if options.server == "all" else [options.server]:
        if name == "http":
            found, table = await attack(options.only)
            checks += found
            tables.append(table)
            continue
        done = await _attack(name, options)
        for check in done.checks():
            say(f"{check.name}: {check.said}")
        checks += done.checks()
        told = ", ".join(f"{status} {n:,}" for status, n in done.statuses.most_common())
        numbers = done.calls, done.messages, done.messages / done.seconds, done.canaries
        rows.append([name, told, *(f"{number:,.0f}" for number in numbers)])
    columns = ["server", "calls by status", "calls", "messages", "messages/s", "canary right"]
    if rows:
        tables.insert(0, make_table(columns, rows, left=2))
    return checked(checks, tables, {"options": options, "servers": rows})


async def _attack(name: str, options: FuzzOptions) -> FuzzRun:
    """Attack a server of the whole stack with the bundled models, or play `only` one script."""
    log: list[str] = []
    flags = ("--idle-timeout-s", f"{IDLE_TIMEOUT_S}")
    stack_options = StackOptions(**SMALL, max_sessions=SESSIONS, max_model_len=CONTEXT,
                                 service_flags=flags)  # fmt: skip
    async with Stack(stack_options, on_log=log.append) as stack:
        await _fill_slots(stack.address)
        addresses = {"draft": stack.options.draft_address, "verify": stack.options.verify_address,
                     "generation": stack.address, "admin": stack.admin_address}  # fmt: skip
        async with FuzzRun(name, addresses, stack.services, options.seed, log) as fuzzing:
            if options.only is None:
                await fuzzing.run(options.num_calls)
            else:
                say(str(fuzzing.script(options.only)))
                async with grpc.aio.insecure_channel(addresses[name]) as channel:
                    await fuzzing.play(channel, options.only)
            return fuzzing


async def _fill_slots(address: str) -> None:
    """Fill every slot: the system grants its memory only then, which must not look like a leak.

    The fuzzed calls would do so little by little.
    """
    options = GenerateOptions(
        max_tokens=CONTEXT // 4, ignore_eos=True, num_speculative_tokens=4, drafter="model"
    )
    prompt = PROMPT * (CONTEXT // 2 // LENGTH)
    async with AsyncClient(address, max_retries=0) as client:
        await asyncio.gather(*(client.complete(prompt, options) for _ in range(SESSIONS)))


if __name__ == "__main__":
    run(single(fuzz))
