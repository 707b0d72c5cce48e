"""The reference page of the command line, from the programs themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

import typer.main

from docs.site.tables import table
from flyspec.cli.help import sections_of
from flyspec.cli.main import app


def page() -> str:
    """Return the page: every command with its arguments and options."""
    root = typer.main.get_command(app)
    return "".join(["# Command line\n\n", *_command(root, None, "flyspec")])


def _command(command: Any, parent: Any, path: str) -> Iterator[str]:
    context = command.context_class(command, info_name=path.split()[-1], parent=parent)
    subcommands = hasattr(command, "list_commands")
    yield f"## {path}\n\n"
    yield cleandoc(command.help or "") + "\n\n"
    usage = " ".join(piece.strip("{}") for piece in command.collect_usage_pieces(context))
    yield f"```text\n{path} {usage}\n```\n\n"
    for heading, records in sections_of(command, context).items():
        yield f"**{heading}**\n\n"
        yield table(["", ""], [(_flag(flag), _escape(text)) for flag, text in records]) + "\n"
    if subcommands:
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            if not found.hidden:
                yield from _command(found, context, f"{path} {name}")


def _flag(text: str) -> str:
    return f"`{text}`"


def _escape(text: str) -> str:
    """Keep Markdown's signs as they are; code between backquotes stays code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", p) for p in pieces)
