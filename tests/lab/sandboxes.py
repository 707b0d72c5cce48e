"""Check that generated code can be run here, for tests that need it."""

from __future__ import annotations

import shutil

import pytest

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None,
    reason="bubblewrap is not installed, so no generated code is run (apt-get install bubblewrap)",
)
