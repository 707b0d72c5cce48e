"""What a soak found: sessions, faults, memory over time; in words and as a plot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from flyspec.drawing import SERVICES, save

MAX_GROWTH = 0.05
"""Most growth of a process's memory over the run, as a share of it, that counts as none."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of a process when `sessions` had ended; `life` counts its restarts."""

    seconds: float
    sessions: int
    service: str
    life: int
    mib: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A service was killed when `sessions` had ended, and started again."""

    service: str
    sessions: int
    killed_s: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How a service's memory grew while warm."""

    service: str
    mib: float
    mib_per_1000_sessions: float
    share: float


@dataclass(slots=True)
class SoakReport:
    """What happened. `failed` is by message, `unexpected` those with all services running.

    `refused` for want of room, and asked again later.
    """

    sessions: int = 0
    completed: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    faults: list[Kill] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    prefix_cache_hit_rate: float = 0.0
    growth: list[Growth] = field(default_factory=list)
    memory: list[ProcessMemory] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the stack stayed as it was."""
        grown = [g for g in self.growth if g.share > MAX_GROWTH]
        return not (grown or self.unexpected or any(self.left.values()))


def growth(memory: list[ProcessMemory]) -> list[Growth]:
    """A slope a service: least squares over all its lives, each with a level of its own.

    The first third of a life, in sessions served, is its warm-up.
    """
    found = []
    for service in sorted({m.service for m in memory}):
        xy = sxx = 0.0
        of = [m for m in memory if m.service == service]
        for _, entries in groupby(of, key=lambda m: m.life):
            life = list(entries)
            first, last = life[0].sessions, life[-1].sessions
            warm = [m for m in life if m.sessions >= first + (last - first) / 3]
            mean_x = sum(m.sessions for m in warm) / len(warm)
            mean_y = sum(m.mib for m in warm) / len(warm)
            xy += sum((m.sessions - mean_x) * (m.mib - mean_y) for m in warm)
            sxx += sum((m.sessions - mean_x) ** 2 for m in warm)
        slope, mib = xy / sxx if sxx else 0.0, of[-1].mib
        total = max(m.sessions for m in of) - min(m.sessions for m in of)
        found.append(Growth(service, mib, 1000 * slope, slope * total / mib))
    return found


def plot(report: SoakReport, path: Path) -> None:
    """Resident memory of each process over the sessions served; dotted where one was killed."""

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        for service, colour in SERVICES.items():
            of = [m for m in report.memory if m.service == service]
            for life, entries in groupby(of, key=lambda m: m.life):
                part = list(entries)
                ax.plot([m.sessions for m in part], [m.mib for m in part], color=colour,
                        label="" if life else service)  # fmt: skip
        for fault in report.faults:
            ax.axvline(fault.sessions, color=SERVICES[fault.service], linewidth=1, linestyle=":")
        ax.set(xlabel="sessions served (dotted: a service is killed; it is started again at once)",
               ylabel="resident memory, MiB", ylim=(0, None),
               title=f"{report.sessions:,} sessions, {report.cancelled:,} of them cancelled, "
               f"{len(report.faults)} kills")  # fmt: skip
        ax.legend(loc="best")

    save(path, (8.0, 3.4), draw)


def show(report: SoakReport) -> None:
    """The report for people."""
    print(
        f"{report.sessions} sessions in {report.seconds:.0f} s: {report.completed} complete, "
        f"{report.cancelled} cancelled, {sum(report.failed.values())} failed "
        f"({len(report.unexpected)} with all services running), {report.refused} times refused and "
        f"asked again; {report.tokens} tokens; "
        f"{report.prefix_cache_hit_rate:.0%} of prompt tokens found in the cache"
    )
    for message, count in sorted(report.failed.items(), key=lambda item: -item[1])[:5]:
        print(f"  {count} x {message}")
    kills = Counter(fault.service for fault in report.faults)
    print("killed:", ", ".join(f"{name} {count} times" for name, count in kills.items()) or "none")
    print("left at the end:", ", ".join(f"{n} {name}" for name, n in report.left.items()))
    for g in report.growth:
        print(
            f"{g.service:12} {g.mib:7.1f} MiB, {g.mib_per_1000_sessions:+.2f} MiB per 1,000 "
            f"sessions while warm ({g.share:+.1%} over the run)"
        )
    print("PASSED" if report.passed else "FAILED")
