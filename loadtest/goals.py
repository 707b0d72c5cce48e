"""What a load test is to show: bounds given on the command line, and whether they held. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.record import METRICS, Metric
from loadtest.summary import Limits, PhaseResult


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was to hold, and what was seen."""

    name: str
    passed: bool
    said: str


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds. `latency` makes goodput; `max_p99` and the others make the exit code."""

    latency: Limits = field(default_factory=dict)
    max_p99: Limits = field(default_factory=dict)
    min_goodput: float | None = None
    max_refused: float | None = None
    max_failures: int = 0

    def check(self, results: Sequence[PhaseResult]) -> list[Check]:
        """Failures count in every phase; the rest in those that are judged."""
        failed = sum(r.figures.failed for r in results)
        checks = [
            Check("failures", failed <= self.max_failures,
                  f"{failed} requests failed, bound {self.max_failures}")
        ]  # fmt: skip
        for result in results:
            if result.phase.judged:
                checks += self._judge(result)
        return checks

    def _judge(self, result: PhaseResult) -> list[Check]:
        figures, name, checks = result.figures, result.phase.name, []
        for metric in METRICS:
            if (bound := self.max_p99.get(metric)) is not None:
                seen = getattr(figures, metric).p99
                checks.append(
                    Check(f"p99 {metric}", seen <= bound,
                          f"{name}: {seen:.0f} ms, bound {bound:g} ms")
                )  # fmt: skip
        if self.min_goodput is not None and figures.goodput is not None:
            checks.append(
                Check("goodput", figures.goodput >= self.min_goodput,
                      f"{name}: {figures.goodput:.1%}, bound {self.min_goodput:.1%}")
            )  # fmt: skip
        if self.max_refused is not None and figures.sent:
            share = figures.refused / figures.sent
            checks.append(
                Check("refused", share <= self.max_refused,
                      f"{name}: {share:.1%}, bound {self.max_refused:.1%}")
            )  # fmt: skip
        return checks


def metric_of(name: str) -> Metric:
    """A time by its name. Raises KeyError."""
    for metric in METRICS:
        if metric == name:
            return metric
    raise KeyError(name)
