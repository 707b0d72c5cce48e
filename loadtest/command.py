"""A command for every scenario."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, getdoc
from typing import Any

import typer

from flyspec.cli.help import HelpCommand
from flyspec.cli.options import with_flags
from flyspec.cli.program import program
from loadtest.scenarios import SCENARIOS, Scenario


def scenario_app(about: str, start: Callable[..., int], **more: Any) -> typer.Typer:
    """A program with a command for each scenario, which runs `start`; its result is the exit code.

    `start` gets the scenario, its `LoadOptions` as `load`, its own flags as `own`, and `more` by
    name: dataclasses of further flags, with their defaults.
    """
    app = program(no_args_is_help=True, help=about)
    for name, scenario in SCENARIOS.items():
        app.command(name, cls=HelpCommand, help=getdoc(scenario), short_help=scenario.about)(
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
