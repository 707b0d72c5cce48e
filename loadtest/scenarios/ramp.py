"""Increasing load: where throughput stops growing and latency starts to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from loadtest.measures import duration, knee, number
from loadtest.scenarios.base import Scenario, ScenarioVerdict, describe, own_flag, variant_of
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase, Open

WARM_UP = 0.05
"""Share of the time."""


def _ascending(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas. Raises `ValueError`."""
    try:
        numbers = tuple(sorted(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] <= 0:
        raise ValueError(f"{text}: must be a comma-separated list of numbers greater than 0")
    return numbers


# fmt: off
@dataclass(frozen=True)
class RampFlags:
    """The steps."""

    steps: Annotated[Sequence[float] | None, own_flag(
        "Users at each step (closed loop).",
        metavar="N,...", default="1,2,4,8,16,32", read=_ascending,
    )] = None
    rates: Annotated[Sequence[float] | None, own_flag(
        "Instead of --steps: requests per second at each step (Poisson arrivals).",
        metavar="RATE,...", read=_ascending,
    )] = None
    against: Annotated[int | None, own_flag(
        "Also measure a curve with this K; 0 is plain decoding.", metavar="K",
    )] = None
    # fmt: on


class Ramp(Scenario[RampFlags]):
    """Increase the load in steps; with --against, every step is run with either K."""

    name = "ramp"
    about = "Load that grows in steps; finds the knee of throughput against latency."
    defaults = RampFlags()

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        ways = [self.options]
        if self.own.against is not None:
            ways.append(replace(self.options, num_speculative_tokens=self.own.against))
        loads: list[Closed | Open] = (
            [Open(rate) for rate in self.own.rates]
            if self.own.rates
            else [Closed(round(users)) for users in self.own.steps or (1, 2, 4, 8, 16, 32)]
        )
        few = loads[len(loads) // 2]
        yield LoadPhase("warm-up", few, WARM_UP * self.seconds, [variant_of(ways[0])], judged=False)
        each = (1 - WARM_UP) * self.seconds / (len(loads) * len(ways))
        for step, load in enumerate(loads):
            # Whichever is second in one step is first in the next.
            for options in ways if step % 2 == 0 else ways[::-1]:
                series = describe(options)
                name = f"{load}, {series}" if len(ways) > 1 else str(load)
                yield LoadPhase(name, load, each, [variant_of(options)], series=series)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        curves: dict[str, Any] = {}
        lines = []
        for series in dict.fromkeys(p.phase.series for p in phases.values() if p.phase.series):
            points = [p for p in phases.values() if p.phase.series == series]
            rates = [p.figures.tokens_per_s for p in points]
            most, last = max(rates), str(points[-1].phase.load)
            curves[series] = {"last_load": last, "most_tokens_per_s": most}
            said = f"knee not reached by {last}, ramp further"
            at = knee([(p.figures.tokens_per_s, p.figures.e2e.mean) for p in points])
            if at is not None:
                load, e2e = str(points[at].phase.load), points[at].figures.e2e
                curves[series] |= {
                    "knee": points[at].phase.name,
                    "knee_load": load,
                    "knee_tokens_per_s": rates[at],
                    "knee_e2e_p50_ms": e2e.p50,
                    "knee_e2e_p99_ms": e2e.p99,
                }
                said = (
                    f"knee at {load}, {number(rates[at])} tokens/s with "
                    f"{duration(e2e.p50)} end to end (p50), {duration(e2e.p99)} (p99)"
                )
            lines.append(f"{series}: {said}; at most {number(most)} tokens/s")
        return ScenarioVerdict({"curves": curves}, lines)
