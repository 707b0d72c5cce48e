"""`flyspec serve`: the whole stack on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flyspec.cli.options import ListeningFlags, ModelFlags, with_flags

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack, StackOptions

_PORTS = "Where to listen"


@with_flags
def serve(
    models: ModelFlags,
    listening: ListeningFlags,
    drafter: Annotated[
        str, typer.Option(help="Default drafter: model, prompt_lookup or multi_level.")
    ] = "",
    rule: Annotated[
        str, typer.Option(help="Default acceptance rule, a preset or one of the rules file.")
    ] = "fly",
    num_speculative_tokens: Annotated[int, typer.Option(help="Default K.", min=0)] = 15,
    max_sessions: Annotated[int, typer.Option(help="Generations at once.", min=1)] = 32,
    host: Annotated[
        str,
        typer.Option(
            help="Of the generation and admin ports; draft and verify stay on loopback.",
            rich_help_panel=_PORTS,
        ),
    ] = "127.0.0.1",
    admin_host: Annotated[
        str,
        typer.Option(help="Of the admin port.", show_default="--host", rich_help_panel=_PORTS),
    ] = "",
    port: Annotated[
        int, typer.Option(help="Generation; 0 picks one.", min=0, rich_help_panel=_PORTS)
    ] = 50050,
    admin_port: Annotated[
        int, typer.Option(help="Administration; 0 picks one.", min=0, rich_help_panel=_PORTS)
    ] = 50053,
    draft_port: Annotated[
        int, typer.Option(help="Draft service; 0 picks one.", min=0, rich_help_panel=_PORTS)
    ] = 50051,
    verify_port: Annotated[
        int, typer.Option(help="Verify service; 0 picks one.", min=0, rich_help_panel=_PORTS)
    ] = 50052,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Of all services.")
    ] = "info",
    json: Annotated[
        bool,
        typer.Option("--json", help="Print addresses and process ids as one JSON line when ready."),
    ] = False,
) -> None:
    """Start draft service, verify service and orchestrator; stop them on Ctrl-C."""
    from flyspec.cli.runtime import run_async

    options = models.to_stack_options(
        drafter=drafter,
        rule=rule,
        num_speculative_tokens=num_speculative_tokens,
        max_sessions=max_sessions,
        host=host,
        admin_host=admin_host or host,
        port=port,
        admin_port=admin_port,
        draft_port=draft_port,
        verify_port=verify_port,
        log_level=log_level,
        orchestrator_flags=listening.orchestrator_flags(),
    )
    raise typer.Exit(run_async(_serve(options, json)))


async def _serve(options: StackOptions, json: bool) -> int:
    """Serve until SIGINT or SIGTERM; exit code 0. A dead service is an error."""
    from flyspec.cli.runtime import error_console, narrate, print_json
    from flyspec.cli.stack import Stack

    console = error_console()
    stop = asyncio.Event()
    with narrate(console) as say:
        stack = Stack(
            options,
            on_event=say,
            on_log=lambda line: console.print(line, style="dim", markup=False),
        )
        await stack.__aenter__()
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
        died = asyncio.ensure_future(stack.wait())
        await asyncio.wait([stopped, died], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if died.done():
            console.print("stopping the others", markup=False)
            await died
        died.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await died
    finally:
        stop.clear()
        await _stop(stack, stop)
    return 0


async def _stop(stack: Stack, again: asyncio.Event) -> None:
    """Drain and stop; a second Ctrl-C does not wait for running generations."""
    from flyspec.cli.runtime import error_console

    error_console().print("stopping; Ctrl-C again does not wait", style="dim", markup=False)
    draining = asyncio.ensure_future(stack.stop())
    impatient = asyncio.ensure_future(again.wait())
    await asyncio.wait([draining, impatient], return_when=asyncio.FIRST_COMPLETED)
    impatient.cancel()
    if not draining.done():
        draining.cancel()  # its `finally` kills what is left
    await asyncio.wait([draining])


def _document(stack: Stack) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "address": stack.address,
        "admin_address": stack.admin_address,
        "draft_address": stack.draft_address,
        "verify_address": stack.verify_address,
        "metrics_ports": _metrics_ports(stack),
        "pids": {name: service.pid for name, service in stack.services.items()},
    }


def _metrics_ports(stack: Stack) -> dict[str, int | None]:
    """Where each service has its metrics; None where it has none."""
    return {name: service.facts.get("metrics_port") for name, service in stack.services.items()}


def _welcome(stack: Stack) -> str:
    """Where things listen, and how to try them."""
    o = stack.options
    flag = "" if stack.address == "127.0.0.1:50050" else f" --address {stack.address}"
    admin = "" if stack.admin_address == "127.0.0.1:50053" else (
        f" --admin-address {stack.admin_address}"
    )  # fmt: skip
    return "\n".join(
        [
            "flyspec is ready",
            f"  generation  {stack.address}",
            f"  admin       {stack.admin_address}",
            f"  draft       {stack.draft_address}   {o.draft_model or 'prompt lookup'}",
            f"  verify      {stack.verify_address}   {o.model}",
            "  metrics     "
            + ", ".join(f"{name} :{port}" for name, port in _metrics_ports(stack).items() if port),
            "try it:",
            f"  flyspec generate{flag} 'def fibonacci(n):'",
            f"  flyspec drafters list{admin}",
            "Ctrl-C stops everything",
        ]
    )
