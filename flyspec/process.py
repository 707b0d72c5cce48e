"""What this process says of itself: which one it is, and how often it loaded a model."""

from __future__ import annotations

import os
import secrets
import time

from flyspec.values.admin import ProcessInfo

_INSTANCE_ID = secrets.token_hex(8)
_STARTED_NS = time.monotonic_ns()
_model_loads = 0


def count_model_load() -> None:
    """A model was loaded."""
    global _model_loads
    _model_loads += 1


def describe() -> ProcessInfo:
    """This process, now."""
    return ProcessInfo(_INSTANCE_ID, os.getpid(), _model_loads, time.monotonic_ns() - _STARTED_NS)
