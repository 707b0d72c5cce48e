"""Runs commands as a user does, outside the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: object, cwd: Path, given: str | None = None, **variables: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=ENVIRONMENT | variables, text=True, input=given,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
