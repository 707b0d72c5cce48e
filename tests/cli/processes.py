"""The command line, as a process or in this one, with what it printed."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from flyspec.cli.main import main
from flyspec.cli.service import ROOT
from tests.waiting import is_gone, until

COMMAND = [sys.executable, "-m", "flyspec.cli"]
FREE_PORTS = ["--port", "0", "--admin-port", "0", "--draft-port", "0", "--verify-port", "0"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/lab", "COLUMNS": "200"}


@dataclass
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT, cwd=ROOT
    )


async def flyspec(*arguments: str, stdin: str = "") -> Result:
    process = await start(*arguments)
    out, err = await process.communicate(stdin.encode())
    result = Result(process.returncode or 0, out.decode(), err.decode())
    assert "Traceback" not in result.err
    return result


def invoke(*arguments: str, stdin: str = "", program: Callable[[], object] = main) -> Result:
    """Run a program in this process, which saves the time that a process needs to start."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with (
        mock.patch.multiple(sys, argv=["flyspec", *arguments], stdin=given, stdout=out, stderr=err),
        mock.patch.dict(os.environ, COLUMNS=ENVIRONMENT["COLUMNS"]),
    ):
        try:
            program()
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["tests.cli.processes", "flyspec.cli.serve", "flyspec.cli.doctor", "flyspec.cli.generate"]
)


def forked(
    *arguments: str, module: str = "", cwd: Path = ROOT, environment: dict[str, str] = ENVIRONMENT
) -> Result:
    """Run a command, or a module, in a fresh process that has imported neither torch nor a service.

    It is forked from one that has imported what commands share, which saves most of the time that
    starting takes. If it imports torch, `err` says so.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        process = _FORKS.Process(
            target=_run, args=(module, arguments, cwd, environment, str(out), str(err))
        )
        process.start()
        process.join()
        return Result(process.exitcode or 0, out.read_text(), err.read_text())


def _run(
    module: str,
    arguments: tuple[str, ...],
    cwd: Path,
    environment: dict[str, str],
    *outputs: str,
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate((os.devnull, *outputs)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = ["flyspec", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True) if module else main()
    finally:
        if "torch" in sys.modules:
            print("torch was imported", file=sys.stderr)


async def all_gone(pids: list[int]) -> bool:
    return await until(lambda: all(map(is_gone, pids)))
