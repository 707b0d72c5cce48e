"""The layout of `--help`: options by heading, in two columns, readable at 80 characters."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flyspec.spelling import did_you_mean

COLUMN = 32
"""Column in which the texts start."""


def _lines(flag: str, text: str, width: int) -> list[str]:
    flag = re.sub(r"<(?:list\[)?(int|float|str)\b[^|>]*>", r"<\1>", flag)
    text = re.sub(r"\bdefault: \((.*)\)(?=[;\]])", r"default: \1", text)
    text = re.sub(r"\bx>=(-?\d+)", r"minimum: \1", text)
    lines = textwrap.wrap(text, width - COLUMN, break_on_hyphens=False)
    if len(flag) > COLUMN - 4:
        lines.insert(0, "")
    return [f"  {flag}".ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]


def _corrected(message: str) -> str:
    """A message on a value that is none of several, with the one that was probably meant."""
    found = re.fullmatch(r"(?:Value error, )?'(.*)' is not one of (.*?)\.?", message)
    if not found:
        return message
    close = did_you_mean(found[1], re.findall(r"'([^']*)'", found[2]))
    return f"{found[1]!r} is not one of {found[2]}{close}"


def sections_of(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return what help says of a command's arguments and options, by heading."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            heading = getattr(parameter, "rich_help_panel", None)
            heading = heading or f"{parameter.param_type_name.capitalize()}s"
            sections.setdefault(heading, []).append(record)
    return {heading: records for heading, records in sections.items() if records}


class _HelpLayout:
    """Description of a command or group."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except typer.BadParameter as error:
            error.message = _corrected(error.message)
            raise

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]

    def format_help_text(self: Any, ctx: Any, formatter: Any) -> None:
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            lines = textwrap.wrap(paragraph, formatter.width - 2, break_on_hyphens=False)
            formatter.write("\n".join(["", *(f"  {line}" for line in lines), ""]))

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        for heading, records in sections_of(self, ctx).items():
            lines = [line for flag, text in records for line in _lines(flag, text, formatter.width)]
            if lines:
                formatter.write("\n".join(["", f"{heading}:", *lines, ""]))


class HelpCommand(_HelpLayout, TyperCommand):
    """A command with this layout."""


class HelpGroup(_HelpLayout, TyperGroup):
    """A group of commands with this layout."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, c.get_short_help_str(300)) for name, c in commands if c and not c.hidden]
            )
