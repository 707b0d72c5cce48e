"""Prometheus and promtool: Debian's package `prometheus`, which `make prometheus` installs."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str) -> str:
    """The path of a program; without it the test is skipped, loudly."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip(
            f"*** {name} is not installed: nothing was checked *** (apt-get install prometheus, or "
            "`make prometheus` as root)"
        )
    return found
