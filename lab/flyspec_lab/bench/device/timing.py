"""Times work on a device: by CUDA events where there are any, elsewhere by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

IN_A_ROW = 4
"""Runs between two events: the host prepares the next while the device works, as in a service."""
WARM_UP = 3


class Allowance:
    """The time that measuring may take, from now on; 0 seconds: any."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()

    @property
    def spent(self) -> float:
        """The share of it that has passed."""
        return (time.monotonic() - self._began) / self._seconds if self._seconds else 0.0


Work = Callable[[], object]


class DeviceTimes(NamedTuple):
    """Milliseconds of some work, over many runs.

    `step_ms` is the median per run of runs that follow each other, `slowest_ms` the longest of
    them; `answer_ms` the median of one run until the host, which waits for it, goes on.
    """

    step_ms: float
    slowest_ms: float
    answer_ms: float


def measure_times(work: Work, device: torch.device, repeats: int) -> DeviceTimes:
    for _ in range(WARM_UP):
        work()
    rows = [_in_a_row(work, device) for _ in range(repeats)]
    answers = answer_times(work, device, repeats)
    return DeviceTimes(statistics.median(rows), max(rows), statistics.median(answers))


def answer_times(work: Work, device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each run until the host, which waits for it, goes on."""
    return [_until_answered(work, device) for _ in range(repeats)]


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Return the bytes read and written per second by a copy of `num_bytes` on a device.

    It bounds whatever reads memory once; the best of the repeats counts.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    best = min(_in_a_row(copy, device) for _ in range(repeats))
    return 2 * num_bytes / (best / 1e3)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_a_row(work: Work, device: torch.device) -> float:
    """Milliseconds per run."""
    if device.type != "cuda":
        began = time.perf_counter_ns()
        for _ in range(IN_A_ROW):
            work()
        return (time.perf_counter_ns() - began) / 1e6 / IN_A_ROW
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(IN_A_ROW):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / IN_A_ROW


def _until_answered(work: Work, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter_ns()
    work()
    synchronize(device)
    return (time.perf_counter_ns() - began) / 1e6
