"""Runs a service as a child: `python -m flyspec.cli.child MODULE FLAGS...`.

The parent holds the other end of standard input. When that closes, however the parent ended, the
service gets SIGTERM, and is killed some seconds later if it is still running. Without arguments,
its `ChildJob` arrives there first, and what it needs is imported meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from flyspec.startup import large_imports

ORPHAN_GRACE_S = 5.0
IMPORTS = "FLYSPEC_CHILD_IMPORTS"
"""Environment variable: modules to import before the job arrives, comma-separated."""


class ChildJob(NamedTuple):
    """A child's job."""

    module: str
    flags: Sequence[str]
    environment: Mapping[str, str]

    def to_line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"


def read_job() -> ChildJob | None:
    """Read a job from standard input; None at its end. Nothing beyond its line is read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return None
        line += byte
    return ChildJob(*json.loads(line))


def run(job: ChildJob) -> None:
    """Run a module as the program of this process, until it ends or the parent does."""
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()
    os.environ.update(job.environment)
    sys.argv = [job.module, *job.flags]
    code = 0
    try:
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    # What follows would take apart all that was imported, which takes as long as half of a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> None:
    if len(sys.argv) > 1:
        run(ChildJob(sys.argv[1], sys.argv[2:], {}))
        return
    with large_imports():
        for module in filter(None, os.environ.get(IMPORTS, "").split(",")):
            with contextlib.suppress(ImportError):  # what needs it will say so
                import_module(module)
    if (job := read_job()) is not None:
        run(job)


if __name__ == "__main__":
    main()
