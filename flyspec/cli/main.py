"""The command `flyspec`: its subcommands, and what becomes of their errors."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flyspec.cli import bench, drafters, evaluate, generate, healthcheck, keys, serve
from flyspec.errors import ConfigError, FlyspecError, InvalidArgumentError, NotFoundError

app = typer.Typer(
    name="flyspec",
    help="Speculative decoding as a service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("healthcheck")(healthcheck.healthcheck)
app.add_typer(drafters.app, name="drafters")
app.add_typer(keys.app, name="keys")
app.add_typer(bench.app, name="bench")
app.command("eval")(evaluate.evaluate)


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
    """Run a command. An error for the user is a message, exit code 2 if they asked wrongly."""
    # Of a handshake that fails gRPC would say more, in words of its own, between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        asked_wrongly = isinstance(error, ConfigError | InvalidArgumentError | NotFoundError)
        raise SystemExit(2 if asked_wrongly else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output is gone: no more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
