"""The `flyspec` command: its subcommands and their errors."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from flyspec.errors import ConfigError, FlyspecError, InvalidArgumentError, NotFoundError

_COMMANDS = {
    "serve": ("serve", "Run the draft service, verify service and orchestrator until Ctrl-C."),
    "generate": ("generate", "Stream completions of prompts, with tokens colored by origin."),
    "healthcheck": ("healthcheck", "Exit with 0 if a server is ready, 1 if not."),
    "drafters": ("app", "List, add, swap and remove the drafters of a running stack."),
    "keys": ("app", "Create API keys."),
    "bench": ("app", "Compare the speed of plain decoding, acceptance rules and transformers."),
    "eval": ("evaluate", "Compare the outputs of plain decoding and acceptance rules."),
}
"""Each command's attribute in its module, and its line in the list of commands."""


_UNBROKEN = "\u2011"  # a hyphen at which lines are not broken


class _OnDemand(TyperGroup):
    """Imports a command when it is called; until then only its help line is known."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _COMMANDS:
            name, (attribute, _) = args[0], _COMMANDS[args[0]]
            module = import_module(f"flyspec.cli.{'evaluate' if name == 'eval' else name}")
            found, alone = getattr(module, attribute), typer.Typer(add_completion=False)
            if attribute == "app":
                alone.add_typer(found, name=name)
            else:
                alone.command(name)(found)
            self.commands[name] = _with_plain_help(get_group(alone).commands[name])
        return super().resolve_command(ctx, args)


def _with_plain_help(command: Any) -> Any:
    """Let a command and its subcommands show help in sections, with names in full."""
    subcommands = getattr(command, "commands", {})

    def format_options(ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                names, text = (_in_plain_words(part) for part in record)
                section = parameter.rich_help_panel or kind
                sections.setdefault(section, []).append((names, text))
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        formatter.buffer[:] = [text.replace(_UNBROKEN, "-") for text in formatter.buffer]
        if subcommands:
            with formatter.section("Commands"):
                rows = [(name, sub.get_short_help_str(200)) for name, sub in subcommands.items()]
                formatter.write_dl(rows)

    command.rich_markup_mode = None
    command.format_options = format_options
    for subcommand in subcommands.values():
        _with_plain_help(subcommand)
    return command


def _in_plain_words(text: str) -> str:
    """Rewrite typer's notation of types, defaults and minimums; keep names of flags unbroken."""
    text = re.sub(r"<(?:list\[)?(int|float|str)\b[^>]*>", r"<\1>", text)
    text = re.sub(r"default: \((.+)\)(?=; x>=|\]$)", r"default: \1", text)
    text = re.sub(r"\bx>=(\d+)", r"minimum: \1", text)
    return re.sub(r"--[a-z-]+", lambda flag: flag[0].replace("-", _UNBROKEN), text)


app = typer.Typer(
    name="flyspec",
    cls=_OnDemand,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("flyspec"))
        except PackageNotFoundError:
            print("not installed")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding as a service."""


def main() -> None:
    """Run a command. User errors print a message; the exit code is 2 for bad input, else 1."""
    # gRPC would print failed handshakes in between our own lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        asked_wrongly = isinstance(error, ConfigError | InvalidArgumentError | NotFoundError)
        raise SystemExit(2 if asked_wrongly else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
