"""The `flyspec` command: its subcommands and their errors."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_group

from flyspec.cli.help import HelpCommand, HelpGroup
from flyspec.cli.program import program, run
from flyspec.version import __version__

_COMMANDS = {
    "serve": ("serve", "Run all services on this machine until Ctrl-C."),
    "generate": ("generate", "Stream completions of prompts, with tokens colored by origin."),
    "doctor": ("doctor", "Say whether `serve` would work here, and what to change."),
    "chat": ("chat", "Hold a conversation, with tokens colored by origin."),
    "healthcheck": ("healthcheck", "Exit with 0 if a server is ready, 1 if not."),
    "drafters": ("app", "List, add, swap and remove the drafters of a running stack."),
    "datastore": ("app", "Build datastores for the drafter rest."),
    "keys": ("app", "Create API keys."),
    "bench": ("app", "Measure the speed of decoding modes and of single parts."),
    "plan": ("plan", "Calculate the speed of a deployment from a bench's measurements."),
    "study": ("study", "Answer questions about rules, each in a report."),
    "tune": ("tune", "Find thresholds for your own prompts."),
    "autojudge": ("app", "Train the judge of the rule autojudge."),
    "heads": ("app", "Train draft heads of a target, and measure them."),
    "eval": ("evaluate", "Compare the outputs of plain decoding and acceptance rules."),
    "audit": ("audit", "Check whether recorded generations follow from a target."),
}
"""Each command's attribute in its module, and its line in the list of commands."""


class _OnDemand(HelpGroup):
    """Imports a command when it is called; until then only its help line is known."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _COMMANDS:
            name, (attribute, _) = args[0], _COMMANDS[args[0]]
            module = import_module(f"flyspec.cli.{'evaluate' if name == 'eval' else name}")
            found = getattr(module, attribute)
            alone = program()
            if attribute == "app":
                for command in found.registered_commands:
                    command.cls = HelpCommand
                alone.add_typer(found, name=name, cls=HelpGroup)
            else:
                alone.command(name, cls=HelpCommand)(found)
            self.commands[name] = get_group(alone).commands[name]
        return super().resolve_command(ctx, args)


app = program(name="flyspec", cls=_OnDemand, no_args_is_help=True, add_completion=True)
for _name, (_, _help) in _COMMANDS.items():
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
