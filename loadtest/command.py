"""What the command lines here share: errors, exit codes, a command for every scenario."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import Parameter, Signature, getdoc
from typing import Any, NoReturn

import typer

from flyspec.cli.options import with_flags
from flyspec.errors import FlyspecError
from loadtest.scenarios import SCENARIOS, Scenario

_APP: Any = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def say(line: str) -> None:
    """Report progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def single(command: Callable[..., None]) -> typer.Typer:
    """A program of one command."""
    app = typer.Typer(**_APP)
    app.command(help=_paragraphs(command))(command)
    return app


def scenario_app(about: str, start: Callable[..., int], **more: Any) -> typer.Typer:
    """A program with a command for each scenario, which runs `start`; its result is the exit code.

    `start` gets the scenario, its `LoadOptions` as `load`, its own flags as `own`, and `more` by
    name: dataclasses of further flags, with their defaults.
    """
    app = typer.Typer(no_args_is_help=True, help=about, **_APP)
    for name, scenario in SCENARIOS.items():
        app.command(name, help=_paragraphs(scenario), short_help=scenario.about)(
            _command(scenario, start, more)
        )
    return app


def _command(
    scenario: type[Scenario[Any]], start: Callable[..., int], more: dict[str, Any]
) -> Callable[..., None]:
    def command(**given: Any) -> None:
        raise typer.Exit(start(scenario, **given))

    defaults = {"own": scenario.defaults, "load": scenario.load, **more}
    command.__annotations__ = {name: type(value) for name, value in defaults.items()}
    command.__signature__ = Signature([  # type: ignore[attr-defined]
        Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in defaults.items()
    ])  # fmt: skip
    return with_flags(command)


def _paragraphs(owner: Any) -> str:
    """The docstring of a command, its paragraphs in one line each: the terminal breaks them."""
    return "\n\n".join(p.replace("\n", " ") for p in (getdoc(owner) or "").split("\n\n"))


def run(app: typer.Typer) -> NoReturn:
    """Run a program. User errors print a message; their exit code is 2."""
    failed = False
    try:
        app()
    except* FlyspecError as errors:
        failed = True
        for error in errors.exceptions:
            say(f"error: {error}")
    except* KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2 if failed else 0)
