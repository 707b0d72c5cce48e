"""`flyspec serve`: run the whole stack on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, NoReturn

import typer

from flyspec import bundled
from flyspec.cli.json_output import print_json
from flyspec.cli.options import ListeningFlags, with_flags
from flyspec.cli.runtime import run_async
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.cli.starting import showing
from flyspec.concurrency import all_or_first_error
from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.progress import error_console
from flyspec.rule_files import load_rules
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.speculation_length import requested
from flyspec.spelling import install_command

QUESTION = "Ana has 20 apples and gives 4 to Ben and 7 to Leo. How many apples does Ana have now?"
"""A question to try; the bundled models, which know word problems only, answer it with 9."""
DEFAULTS = StackOptions(
    admin_host="",
    port=GENERATION_PORT,
    admin_port=ADMIN_PORT,
    http_port=None,
    draft_port=DRAFT_PORT,
    verify_port=VERIFY_PORT,
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before restarting a service that soon died again; doubled each time."""
STABLE_S = 60.0
"""A service that ran for this many seconds is restarted at once."""
MOST_FAILED_STARTS = 5
"""Maximum in a row, for target and orchestrator; a drafter, being optional, is retried for ever."""


@with_flags
def serve(
    listening: ListeningFlags,
    stack: StackOptions = DEFAULTS,
    json: Annotated[
        bool, Flag("When ready, print addresses and process ids as one JSON line.")
    ] = False,
) -> None:
    """Run the draft service, verify service and orchestrator until Ctrl-C.

    A service that dies is restarted.
    """
    raise typer.Exit(run_async(_serve(served(stack, listening), json)))


def served(stack: StackOptions, listening: ListeningFlags) -> StackOptions:
    """Return the options of a stack to serve, from the flags of the command."""
    return replace(
        stack,
        admin_host=stack.admin_host or stack.host,
        orchestrator_flags=listening.orchestrator_flags(),
    )


async def _serve(options: StackOptions, json: bool) -> int:
    """Serve until SIGINT or SIGTERM, restarting services that die. Return exit code 0."""
    console = error_console()
    stop = asyncio.Event()
    stack = Stack(
        options,
        on_event=partial(console.print, markup=False),
        on_log=partial(console.print, style="dim", markup=False),
    )
    with showing(stack, console) as stack.on_stage:
        await stack.__aenter__()
    stack.on_stage = lambda *_: None
    try:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if json:
            print_json(_document(stack))
        else:
            print(_welcome(stack))
            sys.stdout.flush()
        stopped = asyncio.ensure_future(stop.wait())
        kept = asyncio.ensure_future(supervise(stack))
        await asyncio.wait([stopped, kept], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if kept.done():
            console.print("stopping the other services", markup=False)
            await kept
        kept.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await kept
    finally:
        stop.clear()
        await _stop(stack, stop)
    return 0


async def _stop(stack: Stack, again: asyncio.Event) -> None:
    """Drain and stop; a second Ctrl-C stops at once."""
    error_console().print("stopping; press Ctrl-C again to stop at once", style="dim", markup=False)
    draining = asyncio.ensure_future(stack.stop())
    impatient = asyncio.ensure_future(again.wait())
    await asyncio.wait([draining, impatient], return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    if not draining.done():
        draining.cancel()  # its `finally` kills the remaining services
    await asyncio.wait([draining])


def _document(stack: Stack) -> dict[str, object]:
    return {
        "address": stack.address,
        "admin_address": stack.admin_address,
        "http_url": stack.http_url,
        "draft_address": stack.options.draft_address,
        "verify_address": stack.options.verify_address,
        "metrics_ports": _metrics_ports(stack),
        "missing_drafters": stack.missing,
        "pids": {name: service.pid for name, service in stack.services.items()},
    }


def _metrics_ports(stack: Stack) -> dict[str, int | None]:
    return {name: service.facts.get("metrics_port") for name, service in stack.services.items()}


def _welcome(stack: Stack) -> str:
    o = stack.options
    flag = "" if stack.address == "127.0.0.1:50050" else f" --address {stack.address}"
    admin = "" if stack.admin_address == "127.0.0.1:50053" else (
        f" --admin-address {stack.admin_address}"
    )  # fmt: skip
    no_http = f"none; to have it, {install_command('http')}"
    is_bundled = o.model == str(bundled.TARGET)
    bundled_pair = " (bundled: 12 M parameters, word problems only)" if is_bundled else ""
    return "\n".join(
        [
            " without ".join(["flyspec is ready", *filter(None, [", ".join(stack.missing)])]),
            *(f"  missing     {name}: {reason}" for name, reason in stack.missing.items()),
            f"  generation  {stack.address}",
            f"  HTTP        {stack.http_url or no_http}",
            f"  admin       {stack.admin_address}",
            f"  draft       {stack.options.draft_address}   {o.draft_model or 'prompt lookup'}",
            f"  verify      {stack.options.verify_address}   {o.model}{bundled_pair}",
            f"  rule        {_default_rule(o)}",
            "  metrics     "
            + ", ".join(f"{name} :{port}" for name, port in _metrics_ports(stack).items() if port),
            "try it:",
            f"  flyspec generate{flag} --chat '{QUESTION}'",
            f"  flyspec chat{flag}",
            f"  flyspec drafters list{admin}",
            *([f"  curl {stack.http_url}/v1/models"] if stack.http_url else []),
            "press Ctrl-C to stop",
        ]
    )


def _default_rule(options: StackOptions) -> str:
    """Return the rule of requests that name none, and whether it is lossless."""
    k = options.num_speculative_tokens
    book = load_rules(options.rules_file or "", options.rule, k)
    preset = RULE_PRESETS[book.resolve(Rule(options.rule), requested(k)).name]
    if preset.token_exact:
        return f"{options.rule}, lossless: the text is the target's own, token for token"
    if preset.lossless:
        return f"{options.rule}, lossless: the text has the target's distribution"
    exact = "--rule exact is" if "exact" in book.names("") else "requests may name one that is"
    return f"{options.rule}, not lossless: it also accepts tokens near the target's own; {exact}"


async def supervise(
    stack: Stack, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Restart services that die, until cancelled. Raises if target or orchestrator cannot start.

    Generations continue meanwhile: without a drafter they decode plainly, without a target they
    wait (`--reopen-timeout-s`). If the orchestrator dies, its generations are lost.
    """
    await all_or_first_error([_keep(stack, name, sleep) for name in stack.services])


async def _keep(stack: Stack, name: str, sleep: Callable[[float], Awaitable[None]]) -> NoReturn:
    now = asyncio.get_running_loop().time
    failed_starts, pause_s = 0, 0.0
    while True:
        since = now()
        how = await stack.services[name].how_it_ended()
        if now() - since >= STABLE_S:
            pause_s = 0.0
        when = f"in {pause_s:.0f} s" if pause_s else "now"
        stack.say(f"{how}; restarting {when}")
        await sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        try:
            await stack.restart(name)
            failed_starts = 0
        except FlyspecError:
            failed_starts += 1
            if failed_starts == MOST_FAILED_STARTS and name != "draft":
                raise
