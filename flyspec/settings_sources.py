"""Reads a service's settings from flags and environment, and says what is wrong in their words."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliApp, CliSettingsSource, SettingsError

from flyspec.config import ServerSettings
from flyspec.errors import ConfigError
from flyspec.spelling import did_you_mean, respell

S = TypeVar("S", bound=ServerSettings)


class _Help(argparse.HelpFormatter):
    """Omits empty defaults, and None from types."""

    def _expand_help(self, action: argparse.Action) -> str:
        return re.sub(r" \(default: (None)?\)$", "", super()._expand_help(action))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return re.sub(r"\{(.+),None\}$", r"\1", super()._format_action_invocation(action))


def read_settings(settings: type[S], prog: str, argv: Sequence[str]) -> S:
    """Read settings from flags and environment. Raises `ConfigError`; exits for `--help`."""
    known = ["--" + name.replace("_", "-") for name in settings.model_fields]
    source = CliSettingsSource[argparse.ArgumentParser](
        settings, cli_prog_name=prog, formatter_class=_Help, cli_exit_on_error=False
    )
    source.root_parser.usage = "python -m %(prog)s [FLAG VALUE]..."
    names = environment_names(settings, argv)
    try:
        return CliApp.run(settings, cli_args=[*argv], cli_settings_source=source)
    except ValidationError as error:
        problems = [_problem(problem) for problem in error.errors()]
        raise ConfigError(respell("; ".join(problems), names)) from None
    except (SettingsError, argparse.ArgumentError) as error:
        typed = next((a for a in argv if a.partition("=")[0] not in known and a[:2] == "--"), "")
        said = str(error).removeprefix("error parsing CLI: ")
        raise ConfigError(f"{said}{did_you_mean(typed.partition('=')[0], known)}") from None


def _problem(problem: Any) -> str:
    """Description of a setting's error, from pydantic's."""
    flag = "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    value, kind, facts = problem["input"], problem["type"], problem.get("ctx", {})
    if kind == "missing":
        return f"{flag}: is required"
    said = (
        f"{flag} {value}: " if isinstance(value, str | int | float) and value != "" else f"{flag}: "
    )
    if kind == "literal_error":
        expected = facts["expected"]
        choices = re.findall(r"'([^']*)'", expected)
        return f"{said}must be {expected}{did_you_mean(str(value), choices)}"
    if kind.startswith("int_"):
        return f"{said}must be an integer"
    if kind.startswith("float_"):
        return f"{said}must be a number"
    if kind.startswith("bool_"):
        return f"{said}must be true or false"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return said + text.replace("Input should be", "must be").removeprefix("Value error, ")


def environment_names(
    settings: type[ServerSettings], argv: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the environment variables that set something, by the flag that would set it too."""
    arguments = sys.argv[1:] if argv is None else argv
    given = {argument.partition("=")[0] for argument in arguments}
    found = {}
    for name in settings.model_fields:
        flag = "--" + name.replace("_", "-")
        variable = (settings.model_config.get("env_prefix", "") + name).upper()
        if variable in os.environ and not {flag, flag.replace("--", "--no-")} & given:
            found[flag] = variable
    return found


def from_command_line(settings: type[S], prog: str, argv: Sequence[str] | None = None) -> S:
    """Read settings from flags and environment; exit with a message and code 2 if one is bad."""
    try:
        return read_settings(settings, prog, sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
