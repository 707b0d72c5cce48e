"""What all commands have in common: running a coroutine, talking on standard error, JSON output."""

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


def to_json(document: Any) -> str:
    """A document on one line. JSON has no infinity and no NaN: they become null."""
    return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False)


def check_output(output: Path | None, plot: Path | None = None) -> None:
    """Refuse files that cannot be written before anything is measured. Raises `ConfigError`."""
    from flyspec.drawing import check_plot

    check_plot(plot)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")


def write_json(path: Path | None, document: Any) -> None:
    """The document in a file, if there is one."""
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
    """One JSON document on a line of standard output."""
    sys.stdout.write(to_json(document) + "\n")
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


async def with_server(
    options: StackOptions | None,
    address: str | None,
    use: Callable[[Client, Stack | None], Coroutine[Any, Any, T]],
    credentials: Credentials | None = None,
) -> T:
    """Use a running stack, or with `options` one that is started for this and stopped after it.

    `credentials` are for the running one.
    Says what it does while the stack loads; a service that dies meanwhile is the error.
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
    """Flags of a stack to start make no sense with a stack that runs.

    But `--model`, if the command reads the target's files: it says where they are here.
    """
    if local and address:
        raise typer.BadParameter("--local starts a stack, --address names one: give one of them")
    given = [flag for flag in models.given() if not (reads_model and flag == "--model")]
    if not local and given:
        raise typer.BadParameter(
            f"{', '.join(given)}: only with --local; a running stack has its own"
        )
