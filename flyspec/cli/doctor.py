"""`flyspec doctor`: the problems that `flyspec serve` would meet, found without loading."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.cli.json_output import print_json
from flyspec.cli.options import ListeningFlags, read_address, read_admin_address, with_flags
from flyspec.cli.runtime import run_async
from flyspec.cli.serve import DEFAULTS, served
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.doctor import Diagnosis

WIDTH = 80
_RUNNING = "A running installation"


@with_flags
def doctor(
    listening: ListeningFlags,
    stack: StackOptions = DEFAULTS,
    address: Annotated[
        str | None,
        Flag(
            "Examine the installation at this generation address instead.",
            group=_RUNNING,
            read=read_address,
        ),
    ] = None,
    admin_address: Annotated[
        str | None,
        Flag(
            "Its admin address, to examine its services too.",
            group=_RUNNING,
            read=read_admin_address,
        ),
    ] = None,
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
) -> None:
    """Say whether `serve` with these options would work, and what to change.

    Reads no weights. With --address, examines a running installation; its key and certificates
    come from FLYSPEC_API_KEY, FLYSPEC_SSL_CA_CERTS and so on. The exit code is 1 if there is an
    error.
    """
    from flyspec.doctor import Mark, as_document, as_text

    if address or admin_address:
        findings = _running(address, admin_address)
    else:
        findings = _planned(served(stack, listening))
    if json:
        print_json(as_document(findings))
    else:
        print(as_text(findings, WIDTH))
    raise typer.Exit(any(finding.mark is Mark.ERROR for finding in findings))


def _planned(options: StackOptions) -> Sequence[Diagnosis]:
    # Configurations and tokenizers are all that this process reads: transformers does without
    # torch, whose import takes seconds.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # one of them on torch
    from flyspec.cli.preflight import names_of, settings_of
    from flyspec.doctor.examination import examine

    stack = Stack(options)
    flags = {name: stack.flags(name) for name in ("verify", "draft", "orchestrator")}
    verify, draft, orchestrator = (settings_of(name, given) for name, given in flags.items())
    names = {name: names_of(name, given) for name, given in flags.items()}
    return [*examine(verify, draft, orchestrator, names)]


def _running(address: str | None, admin_address: str | None) -> Sequence[Diagnosis]:
    from flyspec.client import DEFAULT_ADDRESS
    from flyspec.doctor.running import running

    credentials = Credentials.from_environment()
    return run_async(running(address or DEFAULT_ADDRESS, admin_address, credentials))
