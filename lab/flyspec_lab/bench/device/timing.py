"""Times of work on a device, by the clock, which waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

IN_A_ROW = 4
"""Runs timed together: the host prepares the next while the device works, as in a service."""
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
    rows = [_each_ms(work, device, IN_A_ROW) for _ in range(repeats)]
    answers = answer_times(work, device, repeats)
    return DeviceTimes(statistics.median(rows), max(rows), statistics.median(answers))


def answer_times(work: Work, device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each run until the host, which waits for it, goes on."""
    return [_each_ms(work, device, 1) for _ in range(repeats)]


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Return the bytes read and written per second by a copy of `num_bytes` on a device.

    It bounds whatever reads memory once; the best of the repeats counts.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    best = min(_each_ms(copy, device, IN_A_ROW) for _ in range(repeats))
    return 2 * num_bytes / (best / 1e3)


def _each_ms(work: Work, device: torch.device, runs: int) -> float:
    """Return the milliseconds of each of several runs, one after the other."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else int
    synchronize()
    began = time.perf_counter_ns()
    for _ in range(runs):
        work()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6 / runs
