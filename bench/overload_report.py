"""What ten times the load did: latencies, refusals, memory; as a table, a document and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.open_loop import Run
from flyspec.drawing import BLUE, GREY, ORANGE, SERVICES, save
from flyspec.tables import Table, make_table
from loadtest.measures import growth, percentile
from loadtest.sampler import Memory

MAX_P99_RATIO = 2.0
"""p99 latency of accepted requests under overload, relative to that at 80 % load."""
MAX_RECOVERY_S = 5.0
"""From the load's end to when a request is sent that has a normal latency: p99 at 80 %."""
MAX_REFUSAL_S = 0.5
"""p99 of the time to a refusal that counts as at once."""
MAX_GROWTH = 0.05
"""Growth of a process's memory over the overload, warm-up left out, that counts as none."""
MAX_LATE_S = 0.1
"""p99 of how late requests are sent; beyond it the generator is too slow for its own load."""


@dataclass(frozen=True, slots=True)
class OverloadPhase:
    """Requests of one load. Seconds; latencies are those of completed requests."""

    name: str
    seconds: float
    rate: float
    sent: int
    completed: int
    refused: int
    failed: int
    tokens_per_second: float
    latency_p50_s: float
    latency_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    refusals_without_retry: int
    late_p99_s: float
    generator_busy: float

    @classmethod
    def of(cls, name: str, rate: float, runs: Sequence[Run]) -> OverloadPhase:
        """Sum up the runs of one phase."""
        results = [r for run in runs for r in run.results]
        latencies = [s for run in runs for s in run.latencies()]
        refused = [r for r in results if r.outcome == "refused"]
        refusals = [r.seconds for r in refused]
        seconds = sum(run.seconds for run in runs)
        return cls(
            name=name,
            seconds=seconds,
            rate=rate,
            sent=len(results),
            completed=len(latencies),
            refused=len(refused),
            failed=sum(run.count("failed") for run in runs),
            tokens_per_second=sum(r.tokens for r in results) / seconds,
            latency_p50_s=percentile(latencies, 0.5),
            latency_p99_s=percentile(latencies, 0.99),
            refusal_p50_s=percentile(refusals, 0.5),
            refusal_p99_s=percentile(refusals, 0.99),
            refusals_without_retry=sum(r.retry_after_s is None for r in refused),
            late_p99_s=percentile([r.sent - r.planned for r in results], 0.99),
            generator_busy=statistics.mean(run.busy for run in runs),
        )


@dataclass(slots=True)
class OverloadReport:
    """The whole measurement. `left` are sessions and generations at its end."""

    slots: int
    sustainable_rate: float
    factor: float
    phases: list[OverloadPhase] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    recovery_s: float = math.nan
    left: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    def phase(self, name: str) -> OverloadPhase:
        """The phase of that name."""
        return next(p for p in self.phases if p.name == name)

    @property
    def p99_ratio(self) -> float:
        """p99 latency of accepted requests under overload over that at 80 %."""
        return self.phase("overload").latency_p99_s / self.phase("80 %").latency_p99_s

    @property
    def growth(self) -> dict[str, float]:
        """Of each process, growth over the overload as a share: last third against the middle."""
        services = sorted({m.service for m in self.memory})
        found = {s: growth([m.mib for m in self.memory if m.service == s]) for s in services}
        return {service: share for service, share in found.items() if share is not None}

    def broken(self) -> list[str]:
        """The bounds that did not hold, in words."""
        overload = self.phase("overload")
        checks = [
            (self.p99_ratio <= MAX_P99_RATIO,
             f"p99 of accepted requests is {self.p99_ratio:.2f} times that at 80 %, "
             f"bound {MAX_P99_RATIO:g}"),
            (overload.refusal_p99_s <= MAX_REFUSAL_S,
             f"refusals take {overload.refusal_p99_s:.3f} s (p99), bound {MAX_REFUSAL_S:g} s"),
            (overload.refusals_without_retry == 0,
             f"{overload.refusals_without_retry} refusals do not say when to retry"),
            (self.recovery_s <= MAX_RECOVERY_S,
             f"normal latency is back after {self.recovery_s:.1f} s, bound {MAX_RECOVERY_S:g} s"),
            (not any(self.left.values()), f"left at the end: {self.left}"),
            (not self.errors, f"requests failed: {self.errors}"),
            (overload.late_p99_s <= MAX_LATE_S,
             f"the generator is late by {overload.late_p99_s:.3f} s (p99): its own figures, and "
             "not the stack's, are measured"),
        ]  # fmt: skip
        checks += [
            (share <= MAX_GROWTH, f"memory of {name} grew by {share:.1%}, bound {MAX_GROWTH:.0%}")
            for name, share in self.growth.items()
        ]
        return [why for holds, why in checks if not holds]

    def to_document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "p99_ratio": self.p99_ratio,
            "growth": self.growth,
            "broken": self.broken(),
            "passed": not self.broken(),
        }


def table(report: OverloadReport) -> Table:
    """A row a phase."""
    columns = ("load", "req/s", "sent", "completed", "refused", "tokens/s", "latency p50", "p99",
               "refusal p50", "p99", "late p99", "generator")  # fmt: skip
    rows = [
        (
            p.name, f"{p.rate:.1f}", str(p.sent), str(p.completed), str(p.refused),
            f"{p.tokens_per_second:.0f}", f"{p.latency_p50_s:.2f} s", f"{p.latency_p99_s:.2f} s",
            *(f"{1e3 * s:.0f} ms" if p.refused else "-"
              for s in (p.refusal_p50_s, p.refusal_p99_s)),
            f"{1e3 * p.late_p99_s:.0f} ms", f"{p.generator_busy:.0%}",
        )
        for p in report.phases
    ]  # fmt: skip
    title = f"{report.slots} slots, sustainable: {report.sustainable_rate:.2f} req/s"
    return make_table(columns, rows, title)


def summary(report: OverloadReport) -> str:
    """What the bounds are about, and whether they hold."""
    lines = [
        f"p99 of accepted requests under overload: {report.p99_ratio:.2f} times that at 80 %",
        f"normal latency after the end of the load: within {report.recovery_s:.1f} s",
        "memory over the overload: "
        + ", ".join(f"{name} {share:+.1%}" for name, share in report.growth.items()),
    ]
    broken = report.broken()
    return "\n".join([*lines, *(f"BROKEN: {why}" for why in broken), *(["PASSED"] * (not broken))])


def plot(report: OverloadReport, path: Path) -> None:
    """Latency of each accepted request over time, and memory of each process."""

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        accepted = [r for r in report.results if r["outcome"] == "complete"]
        left.plot([r["planned"] for r in accepted],
                  [r["seconds"] + r["sent"] - r["planned"] for r in accepted],
                  ".", color=BLUE, markersize=2, label="accepted")  # fmt: skip
        base = report.phase("80 %").latency_p99_s
        left.axhline(base, color=GREY, linewidth=1, label="p99 at 80 %")
        left.axhline(2 * base, color=ORANGE, linewidth=1, linestyle=":", label="twice that")
        left.set(xlabel=f"seconds of {report.factor:g} times the sustainable rate",
                 ylabel="latency, s", ylim=(0, None))  # fmt: skip
        left.legend(loc="lower right")
        for service, colour in SERVICES.items():
            of = [m for m in report.memory if m.service == service]
            right.plot([m.seconds for m in of], [m.mib for m in of], color=colour, label=service)
        right.set(xlabel="seconds", ylabel="resident memory, MiB", ylim=(0, None))
        right.legend(loc="best")

    save(path, (8.0, 3.2), draw)
