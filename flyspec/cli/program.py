"""Programs with the help, errors and exit codes of `flyspec`: `python -m loadtest` and others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from flyspec.cli.help import HelpCommand, HelpGroup
from flyspec.errors import ConfigError, FlyspecError, InvalidArgumentError, NotFoundError
from flyspec.spelling import install_command


def program(**known: Any) -> typer.Typer:
    """Return a program without commands; `known` is passed to typer."""
    given: dict[str, Any] = {
        "cls": HelpGroup,
        "add_completion": False,
        "pretty_exceptions_enable": False,
        "rich_markup_mode": None,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    return typer.Typer(**given | known)


def single(command: Callable[..., None]) -> typer.Typer:
    app = program()
    app.command(cls=HelpCommand)(command)
    return app


def say(line: str) -> None:
    """Report progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def check_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Check before any work that a file can be written. Raises `ConfigError`."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: must end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: no such directory: {path.parent}")


@contextmanager
def needing(what: str, extras: str) -> Iterator[None]:
    """Name the extras to install if an import in the context fails. Raises `ConfigError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs {error.name}; to have it, {install_command(extras)}"
        ) from None


def run(app: typer.Typer, failed: int = 2) -> NoReturn:
    """Run a program. Errors print a message; the exit code is 2 for bad input, else `failed`."""
    code = 0
    try:
        app()
    except* FlyspecError as errors:
        code = failed
        for error in errors.exceptions:
            say(f"error: {error}")
            if isinstance(error, ConfigError | InvalidArgumentError | NotFoundError):
                code = 2
    except* KeyboardInterrupt:
        code = 130
    except* BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
