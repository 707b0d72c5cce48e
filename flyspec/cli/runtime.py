"""What all commands have in common: running a coroutine, talking on standard error, JSON output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flyspec.cli.options import ModelFlags
    from flyspec.cli.stack import Stack, StackOptions

T = TypeVar("T")


class Terminated(BaseException):  # noqa: N818  (like KeyboardInterrupt, it is no error)
    """SIGTERM came."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end. Ctrl-C and SIGTERM cancel the work, which cleans up after itself."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        terminated = False

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await work
        except asyncio.CancelledError:
            if terminated:
                raise Terminated from None
            raise

    try:
        return asyncio.run(main())
    except Terminated:
        raise typer.Exit(128 + signal.SIGTERM) from None


def print_json(document: Any) -> None:
    """One JSON document on a line of standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def error_console() -> Console:
    """Standard error, where everything that is not the result goes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def narrate(console: Console, quiet: bool = False) -> Iterator[Any]:
    """A function that says what is being done: a spinner on a terminal, plain lines elsewhere."""
    if quiet:
        yield lambda text: None
    elif console.is_terminal:
        with console.status("starting", spinner="dots") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: console.print(text, markup=False)


@asynccontextmanager
async def local_stack(options: StackOptions) -> AsyncIterator[Stack]:
    """A stack for the duration of a command; says what it does while it loads."""
    from flyspec.cli.stack import Stack

    console = error_console()
    with narrate(console) as say:
        stack = Stack(options, on_event=say)
        await stack.__aenter__()
    try:
        yield stack
    finally:
        await stack.__aexit__()


def refuse_model_flags(models: ModelFlags, local: bool, address: str | None) -> None:
    """Flags of a stack to start make no sense with a stack that runs."""
    if local and address:
        raise typer.BadParameter("--local starts a stack, --address names one: give one of them")
    if not local and models.given():
        raise typer.BadParameter(
            f"{', '.join(models.given())}: only with --local; a running stack has its models"
        )
