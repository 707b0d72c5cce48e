"""What is seen of an installation from beside: processes' memory, its orchestrator's status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.errors import FlyspecError

if TYPE_CHECKING:
    from loadtest.admin import Admin, Occupancy

MAX_SAMPLES = 300
"""Kept in a report."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process, MiB, so many seconds after the test began."""

    seconds: float
    service: str
    mib: float


class Sampler:
    """Samples of memory, of processes by name, and of status, if there is an admin port."""

    def __init__(
        self,
        pids: Mapping[str, int],
        admin: Admin | None,
        now: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._pids, self._admin, self._now, self._say = pids, admin, now, say
        self.memory: list[Memory] = []
        self._statuses: list[tuple[float, Occupancy]] = []

    def look(self) -> None:
        """Take a sample of everything."""
        for name, pid in self._pids.items():
            mib = resident_mib(pid)
            if mib is not None:
                self.memory.append(Memory(self._now(), name, mib))
        if self._admin is not None:
            try:
                self._statuses.append((self._now(), self._admin.status()))
            except FlyspecError as error:
                self._say(f"status: {error}")

    def memory_document(self) -> dict[str, dict[str, list[float]]]:
        """MiB over seconds, by process."""
        found = {}
        for name in self._pids:
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
            "active": [status.active for _, status in samples],
            "waiting": [status.waiting for _, status in samples],
            "target_sessions": [status.target_sessions for _, status in samples],
        }


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process that is still there, MiB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(kib[0]) / 1024 if kib else None


def _thin(samples: list[Any]) -> list[Any]:
    """At most `MAX_SAMPLES` of them, at even distances."""
    step = -(-len(samples) // MAX_SAMPLES) or 1
    return samples[::step]
