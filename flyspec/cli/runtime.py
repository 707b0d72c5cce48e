"""Shared by all commands: running a coroutine, messages on standard error, JSON output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from flyspec.cli.options import ModelFlags
    from flyspec.cli.stack import Stack, StackOptions
    from flyspec.client import Client, Credentials

T = TypeVar("T")


class Terminated(BaseException):
    """SIGTERM was received."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Ctrl-C and SIGTERM cancel it, so that it can clean up."""

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


def to_json(document: Any) -> str:
    """Return a document as one line of JSON, with null for infinities and NaN."""
    return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False)


def check_output(output: Path | None, plot: Path | None = None) -> None:
    """Raise `ConfigError` for files that cannot be written, before anything is measured."""
    from flyspec.drawing import check_plot

    check_plot(plot)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: no such directory: {output.parent}")


def write_json(path: Path | None, document: Any) -> None:
    if path is not None:
        path.write_text(to_json(document) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def print_json(document: Any) -> None:
    sys.stdout.write(to_json(document) + "\n")
    sys.stdout.flush()


def error_console() -> Console:
    """Return a console on standard error, for everything but results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def narrate(console: Console) -> Iterator[Any]:
    """Yield a function that reports progress: a spinner on a terminal, else plain lines."""
    if console.is_terminal:
        with console.status("starting", spinner="dots") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: console.print(text, markup=False)


async def with_server(
    options: StackOptions | None,
    address: str | None,
    use: Callable[[Client, Stack | None], Coroutine[Any, Any, T]],
    credentials: Credentials | None = None,
) -> T:
    """Use a running stack, with `credentials`; or with `options`, a stack started just for this.

    Reports progress while the stack loads. If one of its services dies, raises why.
    """
    from flyspec.cli.stack import Stack
    from flyspec.client import DEFAULT_ADDRESS, Client

    if options is None:
        address = address or DEFAULT_ADDRESS
        async with Client(address, credentials=credentials) as client:
            return await use(client, None)
    async with AsyncExitStack() as resources:
        with narrate(error_console()) as say:
            stack = await resources.enter_async_context(Stack(options, on_event=say))
        client = await resources.enter_async_context(Client(stack.address))
        return await stack.guard(use(client, stack))


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
