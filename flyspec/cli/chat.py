"""`flyspec chat`: a conversation with the target in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from flyspec.cli.conditions import Then, Until, with_phases
from flyspec.cli.options import Color, ModelFlags, with_flags
from flyspec.cli.runtime import refuse_model_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.cli.streaming import DEFAULTS as STREAMED
from flyspec.cli.streaming import wants_color
from flyspec.credentials import Credentials
from flyspec.flags import Flag
from flyspec.values.requests import GenerateOptions

DEFAULTS = replace(STREAMED, max_tokens=None)


# fmt: off
@with_flags
def chat(
    models: ModelFlags,
    connection: Credentials,
    options: GenerateOptions = DEFAULTS,
    until: Until = (),
    then: Then = (),
    address: Annotated[str | None, Flag(
        "Address of a running stack.", default="127.0.0.1:50050",
    )] = None,
    local: Annotated[bool, Flag("Start a stack for this command.")] = False,
    system: Annotated[str, Flag("System message; not every chat template has one.")] = "",
    color: Annotated[Color, Flag("Color tokens by their origin.")] = "auto",
) -> None:
    # fmt: on
    """Hold a conversation, with tokens colored by origin. /help lists what can be typed.

    Without a terminal, each line of standard input is a message, and answers are printed plainly.
    """
    import asyncio
    from contextlib import AsyncExitStack

    from flyspec.cli.conversation import Conversation, Terminal
    from flyspec.cli.runtime import open_server

    refuse_model_flags(models, local, address)
    options = with_phases(options, until, then)
    for flag, given in ("--logprobs", options.logprobs), ("--return-rounds", options.return_rounds):
        if given:
            raise typer.BadParameter(f"{flag}: only with `flyspec generate --json`")
    stack = StackOptions(**vars(models), log_level="warning") if local else None
    terminal = Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else None
    # Input is read outside the event loop, so that Ctrl-C and line editing work as in a shell.
    with asyncio.Runner() as runner:
        resources = AsyncExitStack()
        try:
            client, server = runner.run(
                resources.enter_async_context(open_server(stack, address, connection))
            )
            talk = Conversation(client, server, options, system, wants_color(color), terminal)
            code = talk.hold(runner)
        finally:
            runner.run(resources.aclose())
    raise typer.Exit(code)
