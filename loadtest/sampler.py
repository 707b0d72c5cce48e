"""Processes seen from outside: their memory, its growth, and sessions that they have open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from flyspec.client import Status


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident memory of a process after it had `served` this many requests."""

    seconds: float
    served: int
    mib: float


class Sampler:
    """Samples the memory of local processes, by name."""

    def __init__(
        self, pids: Mapping[str, int], now: Callable[[], float], served: Callable[[], int]
    ) -> None:
        self.pids, self._now, self._served = dict(pids), now, served
        self.memory: dict[str, list[MemorySample]] = {}

    def look(self) -> None:
        for name, pid in self.pids.items():
            if (mib := resident_mib(pid)) is not None:
                sample = MemorySample(self._now(), self._served(), mib)
                self.memory.setdefault(name, []).append(sample)

    def growth(self, begin: float, end: float) -> dict[str, float]:
        """Return how many MiB each process's memory grows in [begin, end]."""
        within = {
            name: [s for s in samples if begin <= s.seconds <= end]
            for name, samples in self.memory.items()
        }
        return {name: growth(samples) for name, samples in within.items() if samples}


def growth(samples: Sequence[MemorySample]) -> float:
    """Return how many MiB a process's memory grows over as many requests as it has served.

    The first third of them is its warm-up. Of the second and the last, the least memory counts,
    since a moment's large messages come and go.
    """
    first, third = samples[0].served, (samples[-1].served - samples[0].served) / 3
    warm = [s for s in samples if s.served >= first + third]
    after = [s.mib for s in warm if s.served >= first + 2 * third]
    before = [s.mib for s in warm if s.served < first + 2 * third] or after
    return 3 * (min(after) - min(before))


def resident_mib(pid: int) -> float | None:
    """Return the resident memory of a process in MiB, if it is still there."""
    try:
        return float(psutil.Process(pid).memory_info().rss / (1 << 20))
    except psutil.NoSuchProcess:
        return None


def left_open(status: Status) -> dict[str, int]:
    """Return what must be 0 without requests: sessions of both services, generations."""
    return {
        "verify sessions": sum(u.sessions.active for u in status.targets),
        "draft sessions": sum(u.sessions.active for u in status.drafters),
        "generations": status.active_generations,
        "waiting": status.waiting_generations,
    }


def slots(status: Status) -> int | None:
    """Return how many generations the services can hold at once; None if unknown."""
    limits = [
        sum(u.sessions.limit for u in of if u.ready) for of in (status.targets, status.drafters)
    ]
    return min((limit for limit in limits if limit), default=None)
