"""Every help page fits: no line is wider than the terminal, no flag is cut."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import pytest
import typer
from rich.cells import cell_len
from typer.main import get_command

from flyspec.cli.main import app
from flyspec.cli.service import ROOT

Page = tuple[tuple[str, ...], Any]

MODULES = [
    "loadtest", "loadtest ramp", "loadtest.bundled soak", "loadtest.chaos", "loadtest.fuzz",
    "draft_service", "verify_service", "orchestrator",
]  # fmt: skip


def pages(command: Any, path: tuple[str, ...]) -> Iterator[Page]:
    yield path, command
    with typer.Context(command, info_name=path[-1]) as context:
        for name in getattr(command, "commands", {}):
            _, child, _ = command.resolve_command(context, [name])
            yield from pages(child, (*path, name))


PAGES = dict(pages(get_command(app), ("flyspec",)))


def check(shown: str, width: int) -> None:
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_help_fits(path: tuple[str, ...], width: int) -> None:
    out = io.StringIO()
    with redirect_stdout(out), mock.patch.dict(os.environ, COLUMNS=str(width)):
        get_command(app).main([*path[1:], "--help"], prog_name="flyspec", standalone_mode=False)
    shown = out.getvalue()
    check(shown, width)
    for parameter in PAGES[path].params:
        assert all(name in shown for name in parameter.opts if name.startswith("--"))


@pytest.mark.parametrize("module", MODULES)
def test_help_of_other_programs_fits(module: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", *module.split(), "--help"], cwd=ROOT, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/lab", "COLUMNS": "80"},
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    check(shown, 80)
