"""The `flyspec` command: its subcommands and their errors."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_group

from flyspec.cli.help import HelpCommand, HelpGroup
from flyspec.cli.program import program, run
from flyspec.errors import ConfigError
from flyspec.spelling import install_command
from flyspec.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_COMMANDS = {
    "serve": ("serve", "Run all services on this machine until Ctrl-C."),
    "generate": ("generate", "Stream completions of prompts, with tokens colored by origin."),
    "doctor": ("doctor", "Say whether `serve` would work here, and what to change."),
    "plan": ("plan", "Calculate what a draft model gains on given devices."),
    "chat": ("chat", "Hold a conversation, with tokens colored by origin."),
    "healthcheck": ("healthcheck", "Exit with 0 if a server is ready, 1 if not."),
    "drafters": ("app", "List, add, swap and remove the drafters of a running stack."),
    "datastore": ("app", "Build datastores for the rest drafter."),
    "keys": ("app", "Create API keys."),
}
"""Each command's attribute in its module, and its line in the list of commands."""
_OF_THE_LABORATORY = {
    "bench": "Measure the speed of decoding modes and of single parts.",
    "study": "Answer questions about rules, each in a report.",
    "tune": "Find thresholds for your own prompts.",
    "autojudge": "Train the judge of the rule autojudge.",
    "heads": "Train draft heads of a target.",
    "eval": "Compare the outputs of plain decoding and acceptance rules.",
    "audit": "Check whether recorded generations follow from a target.",
}
"""Commands of the distribution flyspec-lab, which has an entry point for each."""
_LONG = ("tune", "eval")
"""Commands that take minutes even with defaults: without arguments they show their help."""


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points

    return entry_points(group="flyspec.commands")


def _imported(name: str) -> Any:
    if name in _COMMANDS:
        return getattr(import_module(f"flyspec.cli.{name}"), _COMMANDS[name][0])
    found = _entry_points().select(name=name)
    if not found:
        raise ConfigError(
            f"flyspec {name} is part of the laboratory; to have it, {install_command('lab')}"
        )
    return next(iter(found)).load()


class _OnDemand(HelpGroup):
    """Imports a command when it is called; until then only its help line is known."""

    def list_commands(self, ctx: Any) -> list[str]:
        installed = _entry_points().names
        return [n for n in super().list_commands(ctx) if n in _COMMANDS or n in installed]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            name = args[0]
            found, alone = _imported(name), program()
            if isinstance(found, typer.Typer):
                for command in found.registered_commands:
                    command.cls = HelpCommand
                alone.add_typer(found, name=name, cls=HelpGroup)
            else:
                alone.command(name, cls=HelpCommand, no_args_is_help=name in _LONG)(found)
            self.commands[name] = get_group(alone).commands[name]
        return super().resolve_command(ctx, args)


app = program(name="flyspec", cls=_OnDemand, no_args_is_help=True, add_completion=True)
_HELP = {name: line for name, (_, line) in _COMMANDS.items()} | _OF_THE_LABORATORY
for _name, _help in _HELP.items():
    app.command(_name, help=_help)(lambda: None)


def _version(show: bool) -> None:
    if show:
        print(__version__)
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
    run(app, failed=1)
