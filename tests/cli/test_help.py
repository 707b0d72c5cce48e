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
from tests.cli.processes import ENVIRONMENT, forked

Page = tuple[tuple[str, ...], Any]


def pages(command: Any, path: tuple[str, ...]) -> Iterator[Page]:
    yield path, command
    with typer.Context(command, info_name=path[-1]) as context:
        for name in getattr(command, "commands", {}):
            _, child, _ = command.resolve_command(context, [name])
            yield from pages(child, (*path, name))


PAGES = dict(pages(get_command(app), ("flyspec",)))


def check(shown: str) -> None:
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_help_fits(path: tuple[str, ...]) -> None:
    out = io.StringIO()
    with redirect_stdout(out), mock.patch.dict(os.environ, COLUMNS="80"):
        get_command(app).main([*path[1:], "--help"], prog_name="flyspec", standalone_mode=False)
    shown = out.getvalue()
    check(shown)
    for parameter in PAGES[path].params:
        assert all(name in shown for name in parameter.opts if name.startswith("--"))


@pytest.mark.parametrize("module", ["draft_service", "verify_service", "orchestrator"])
def test_help_of_services_fits(module: str) -> None:
    check(forked("--help", module=module, environment={**ENVIRONMENT, "COLUMNS": "80"}).out)


LOADTESTS = """
import runpy, sys
for line in sys.argv[1:]:
    module, *arguments = line.split()
    sys.argv = [module, *arguments, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, line
"""


@pytest.mark.slow
def test_help_of_load_tests_fits() -> None:
    """In one process, since each would import locust."""
    lines = ["loadtest", "loadtest ramp", "loadtest.fuzz", "loadtest.chaos"]
    shown = subprocess.run(
        [sys.executable, "-c", LOADTESTS, *lines], cwd=ROOT, text=True, check=True,
        env={**ENVIRONMENT, "COLUMNS": "80"}, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    assert shown.count("--help") >= len(lines)
    check(shown)
