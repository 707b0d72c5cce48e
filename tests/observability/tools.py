"""Prometheus and promtool: Debian's package `prometheus`, which `make prometheus` installs."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str) -> str:
    """Return a program's path; without it, skip the test with a warning."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip(
            f"*** {name} is not installed: nothing was checked *** (apt-get install prometheus, or "
            "`make prometheus` as root)"
        )
    return found
