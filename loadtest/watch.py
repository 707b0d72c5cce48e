"""What is seen of processes from beside: their memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process, MiB, so many seconds after the test began."""

    seconds: float
    service: str
    mib: float


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process that is still there, MiB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(kib[0]) / 1024 if kib else None
