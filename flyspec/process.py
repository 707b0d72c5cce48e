"""Facts about this process: its identity, cores, and number of model loads."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from flyspec.values.admin import ProcessInfo

_instance_id = ""
_started_ns = 0
_model_loads = 0


def _begin() -> None:
    """Note a new process: this one, or a fork of it."""
    global _instance_id, _started_ns
    _instance_id, _started_ns = secrets.token_hex(8), time.monotonic_ns()


_begin()
os.register_at_fork(after_in_child=_begin)


def count_model_load() -> None:
    global _model_loads
    _model_loads += 1


def available_cores() -> int:
    """Return how many cores this process may use at once, by affinity and container limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # another system, or "max"
        pass
    return max(1, cores)


def describe(step_running_ns: int = 0) -> ProcessInfo:
    """Describe this process now; a model step has been running for `step_running_ns`."""
    uptime_ns = time.monotonic_ns() - _started_ns
    return ProcessInfo(_instance_id, os.getpid(), _model_loads, uptime_ns, step_running_ns)
