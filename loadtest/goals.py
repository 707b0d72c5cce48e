"""Goals of a load test, from the command line, and checks of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, get_args

from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec_lab.report import Part, Report, Section
from loadtest.record import METRICS, Metric
from loadtest.summary import Limits, PhaseResult

_goal = partial(Flag, group="Goals (the exit code is 1 if one is missed)")


@dataclass(frozen=True, slots=True)
class Check:
    """Something that had to hold, and what was found."""

    name: str
    passed: bool
    said: str


def checked(checks: Sequence[Check], parts: Sequence[Part], document: Mapping[str, Any]) -> Report:
    """Return the report of a run from its checks, its tables and lines, and further JSON."""
    passed = all(check.passed for check in checks)
    said = [f"{'ok    ' if c.passed else 'BROKEN'} {c.name}: {c.said}" for c in checks]
    document = {"passed": passed, "checks": checks, **document}
    verdict = Section("Checks", [*said, "PASSED" if passed else "FAILED"])
    return Report(document, [*parts, verdict], passed=passed)


def read_limits(text: str) -> Limits:
    """Parse METRIC:MS,METRIC:MS. Raises `ValueError`."""
    limits: dict[Metric, float] = {}
    metrics: Mapping[str, Metric] = {metric: metric for metric in get_args(Metric)}
    for part in text.split(","):
        name, _, ms = part.partition(":")
        try:
            limits[metrics[name]] = float(ms)
        except (KeyError, ValueError):
            raise ValueError(
                f"{part}: not METRIC:MS with METRIC ttft, tpot or e2e, such as ttft:200"
            ) from None
    return limits


# fmt: off
@dataclass(frozen=True)
class Goals:
    """Bounds. `latency` defines goodput; the others decide the exit code."""

    latency: Annotated[Limits | None, _goal(
        "Latency goals in ms of ttft, tpot or e2e: requests that meet all of them are goodput.",
        name="--goodput", metavar="METRIC:MS,...", read=read_limits,
    )] = None
    min_goodput: Annotated[float | None, _goal(
        "Minimum share of requests that meet --goodput.",
    )] = None
    max_p99: Annotated[Limits | None, _goal(
        "Maximum p99 in ms of ttft, tpot or e2e.",
        metavar="METRIC:MS,...", read=read_limits,
    )] = None
    max_refused: Annotated[float | None, _goal(
        "Maximum share of refused requests.",
    )] = None
    max_failures: Annotated[int, _goal("Maximum failed requests.", min=0)] = 0
    # fmt: on

    def validate(self) -> None:
        """Raise `ConfigError` for goals that make no sense together."""
        if self.min_goodput is not None and not self.latency:
            raise ConfigError("--min-goodput: needs --goodput, the latency goals")

    def check(self, results: Sequence[PhaseResult], excused: int = 0) -> list[Check]:
        """Check failures in all phases, except `excused` ones, and the rest in judged phases."""
        failed = sum(r.figures.failed for r in results) - excused
        said = f"{failed} requests failed, bound {self.max_failures}"
        if excused:
            said += f"; {excused} more while a service was down"
        checks = [Check("failures", failed <= self.max_failures, said)]
        for result in results:
            if result.phase.judged:
                checks += self._judge(result)
        return checks

    def _judge(self, result: PhaseResult) -> list[Check]:
        figures, name, checks = result.figures, result.phase.name, []
        for metric in METRICS:
            if (bound := (self.max_p99 or {}).get(metric)) is not None:
                seen = getattr(figures, metric).p99
                said = f"{name}: {seen:.0f} ms, bound {bound:g} ms"
                checks.append(Check(f"p99 {metric}", seen <= bound, said))
        if self.min_goodput is not None and figures.goodput is not None:
            said = f"{name}: {figures.goodput:.1%}, bound {self.min_goodput:.1%}"
            checks.append(Check("goodput", figures.goodput >= self.min_goodput, said))
        if self.max_refused is not None and figures.sent:
            share = figures.refused / figures.sent
            said = f"{name}: {share:.1%}, bound {self.max_refused:.1%}"
            checks.append(Check("refused", share <= self.max_refused, said))
        return checks
