"""Samples of an installation: memory of its processes, status of its orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flyspec.errors import FlyspecError

if TYPE_CHECKING:
    from flyspec.client import Status
    from loadtest.admin import Admin

MAX_SAMPLES = 300
"""Kept in a report."""
STRETCHES = 20
"""Of a warm life: of each, its least memory counts, since a moment's large messages come and go."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of a process after it had `served` this many requests.

    `life` counts how often its service was restarted.
    """

    seconds: float
    served: int
    service: str
    life: int
    mib: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a service's memory once warm: per 1,000 requests, and as a share over the run."""

    service: str
    mib: float
    mib_per_1000: float
    share: float


class Sampler:
    """Samples the memory of local processes by name, and the status if there is an admin port.

    `pids` may change: another process of that name is another life.
    """

    def __init__(
        self,
        pids: dict[str, int],
        admin: Admin | None,
        now: Callable[[], float],
        served: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self.pids, self._admin, self._now, self._served, self._say = pids, admin, now, served, say
        self.memory: list[ProcessMemory] = []
        self._statuses: list[tuple[float, Status]] = []
        self._lives: dict[str, list[int]] = {}

    def look(self) -> None:
        for name, pid in self.pids.items():
            lives = self._lives.setdefault(name, [])
            if pid not in lives:
                lives.append(pid)
            if (mib := resident_mib(pid)) is not None:
                life = lives.index(pid)
                self.memory.append(ProcessMemory(self._now(), self._served(), name, life, mib))
        if self._admin is not None:
            try:
                self._statuses.append((self._now(), self._admin.status()))
            except FlyspecError as error:
                self._say(f"status: {error}")

    def growth(self, begin: float, end: float) -> list[Growth]:
        return growth([m for m in self.memory if begin <= m.seconds <= end])

    def memory_document(self) -> dict[str, dict[str, list[float]]]:
        """MiB over seconds, by process."""
        found = {}
        for name in self.pids:
            samples = _thin([m for m in self.memory if m.service == name])
            if samples:
                found[name] = {
                    "seconds": [m.seconds for m in samples],
                    "mib": [m.mib for m in samples],
                }
        return found

    def status_document(self) -> dict[str, list[float]]:
        """Generations and sessions over seconds."""
        samples = _thin(self._statuses)
        return {
            "seconds": [seconds for seconds, _ in samples],
            "active": [status.active_generations for _, status in samples],
            "waiting": [status.waiting_generations for _, status in samples],
            "target_sessions": [
                sum(u.sessions.active for u in status.targets) for _, status in samples
            ],
        }


def growth(memory: Sequence[ProcessMemory]) -> list[Growth]:
    """The slope of each service's memory: least squares over all lives, each with its own level.

    The first third of a life, in requests served, is its warm-up. Of each of the `STRETCHES` after
    it the least counts.
    """
    found = []
    for service in sorted({m.service for m in memory}):
        xy = sxx = 0.0
        of = [m for m in memory if m.service == service]
        for _, entries in groupby(of, key=lambda m: m.life):
            life = list(entries)
            first, last = life[0].served, life[-1].served
            warm = [m for m in life if m.served >= first + (last - first) / 3]
            size = -(-len(warm) // STRETCHES)
            stretches = (warm[at : at + size] for at in range(0, len(warm), size))
            least = [min(stretch, key=lambda m: m.mib) for stretch in stretches]
            mean_x = fmean(m.served for m in least)
            mean_y = fmean(m.mib for m in least)
            xy += sum((m.served - mean_x) * (m.mib - mean_y) for m in least)
            sxx += sum((m.served - mean_x) ** 2 for m in least)
        slope, mib = xy / sxx if sxx else 0.0, of[-1].mib
        total = max(m.served for m in of) - min(m.served for m in of)
        found.append(Growth(service, mib, 1000 * slope, slope * total / mib))
    return found


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process in MiB, if it is still there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(kib[0]) / 1024 if kib else None


def _thin(samples: list[Any]) -> list[Any]:
    """At most `MAX_SAMPLES` of them, evenly spaced."""
    step = -(-len(samples) // MAX_SAMPLES) or 1
    return samples[::step]
