"""Shared by all commands: running a coroutine, with a stack if need be."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from flyspec.concurrency import StoppedEarly, interrupted

if TYPE_CHECKING:
    from flyspec.cli.options import ModelFlags
    from flyspec.cli.stack import Stack
    from flyspec.cli.stack_options import StackOptions
    from flyspec.client import AsyncClient, Credentials

T = TypeVar("T")

_QUIET_S = 2.0
"""Seconds that a command waits for an answer before it says so."""


class Terminated(BaseException):
    """SIGTERM was received."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Ctrl-C and SIGTERM cancel it, so that it can clean up.

    Raises `StoppedEarly` if it returns after Ctrl-C.
    """

    stopped = False

    async def main() -> T:
        nonlocal stopped
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
            result = await work
            if terminated:
                raise Terminated
            stopped = interrupted()
            return result
        except asyncio.CancelledError:
            if terminated:
                raise Terminated from None
            raise

    try:
        result = asyncio.run(main())
    except Terminated:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if stopped:
        raise StoppedEarly(result)
    return result


async def waiting(doing: str, why: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if it takes long, say so, and why."""
    from flyspec.progress import working

    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=_QUIET_S)
        if not task.done():
            with working(f"{doing}; {why}"):
                await asyncio.wait([task])
        return await task
    finally:
        task.cancel()


async def with_server(
    options: StackOptions | None,
    address: str | None,
    use: Callable[[AsyncClient, Stack | None], Coroutine[Any, Any, T]],
    credentials: Credentials | None = None,
) -> T:
    """Use a server (`open_server`). If a service of a stack of its own dies, raises why."""
    async with open_server(options, address, credentials) as (client, stack):
        work = use(client, stack)
        return await (stack.guard(work) if stack else work)


@asynccontextmanager
async def open_server(
    options: StackOptions | None, address: str | None, credentials: Credentials | None = None
) -> AsyncIterator[tuple[AsyncClient, Stack | None]]:
    """Connect to a running stack, with `credentials`; or with `options`, start one just for this.

    Reports progress while the stack loads.
    """
    from flyspec.cli.stack import Stack
    from flyspec.cli.starting import shown
    from flyspec.client import DEFAULT_ADDRESS, AsyncClient
    from flyspec.progress import error_console

    if options is None:
        address = address or DEFAULT_ADDRESS
        async with AsyncClient(address, credentials=credentials, max_retries=0) as client:
            client.hint = "pass --address"
            yield client, None
        return
    async with (
        shown(Stack(options), error_console()) as stack,
        AsyncClient(stack.address, max_retries=0) as client,
    ):
        yield client, stack


def refuse_model_flags(
    models: ModelFlags, local: bool, address: str | None, reads_model: bool = False
) -> None:
    """Refuse flags for starting a stack when a running one is used.

    With `reads_model`, `--model` is allowed: it says where the target's files are on this machine.
    """
    if local and address:
        raise typer.BadParameter("--local and --address: give only one of them")
    given = [flag for flag in models.given() if not (reads_model and flag == "--model")]
    if not local and given:
        raise typer.BadParameter(
            f"{', '.join(given)}: only with --local; a running stack has its own settings"
        )
