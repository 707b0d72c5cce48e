"""For a while, far more load than can be served."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from loadtest.goals import Check
from loadtest.measures import duration, percentile
from loadtest.scenarios.base import (
    FIXED,
    LoadFlags,
    Scenario,
    ScenarioVerdict,
    bounded,
    own_flag,
    polite,
    served,
    vary_length,
)
from loadtest.summary import PhaseResult, times
from loadtest.work import LoadPhase, Open, Variant

MAX_LATE_MS = 100.0
"""p99 of how late requests are sent; beyond it, the generator measures itself."""


@dataclass(frozen=True)
class BurstFlags(LoadFlags):
    """The burst."""

    factor: Annotated[float, own_flag("Burst, as a multiple of the sustainable rate.")] = 8.0


class Burst(Scenario[BurstFlags]):
    """Poisson arrivals: normal load, a burst, normal load again.

    Excess requests must be refused with a time to retry after. Goals apply before and after the
    burst.
    """

    name = "burst"
    about = "Normal load, a burst of far more than can be served, normal load again."
    defaults = BurstFlags()
    capacity, share = 0.2, 0.2
    """Shares of the time: to measure the sustainable rate; of the burst, of what is then left."""

    @property
    def variants(self) -> Sequence[Variant]:
        return self.plain_variants

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(done, self.capacity * self.seconds)
        normal, rest = Open(self.own.load * rate), (1 - self.share) / 2 * seconds
        yield LoadPhase("before", normal, rest, self.variants)
        yield LoadPhase("burst", Open(self.own.factor * rate), self.share * seconds, self.variants,
                        judged=False, drain=False)  # fmt: skip
        yield LoadPhase("after", normal, rest, self.variants)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        normal, after = self.normal_again(phases)
        line = (
            f"a request sent {after:.1f} s after the burst had a normal latency again (p99 "
            f"before: {duration(normal)})"
            if after < math.inf
            else "no request after the burst had a normal latency"
        )
        return ScenarioVerdict(
            {"normal_e2e_ms": normal, "normal_again_after_s": after},
            [line],
            [polite(phases.values()), served(phases["after"], "burst")],
        )

    def normal_again(self, phases: Mapping[str, PhaseResult]) -> tuple[float, float]:
        """Normal latency, p99 of before, ms; seconds until a request after the burst had it."""
        normal, ended = phases["before"].figures.e2e.p99, phases["burst"].sent_until
        again = [r.planned - ended for r in self.world.records
                 if r.phase == "after" and (r.metric("e2e") or math.inf) <= normal]  # fmt: skip
        return normal, min(again, default=math.inf)


# fmt: off
@dataclass(frozen=True)
class OverloadFlags(BurstFlags):
    """The bounds."""

    max_p99_ratio: Annotated[float, own_flag(
        "Maximum p99 latency of accepted requests, as a multiple of that under normal load.",
    )] = 2.0
    max_refusal: Annotated[float, own_flag("Maximum p99 time to a refusal, in ms.")] = 500.0
    max_recovery: Annotated[float, own_flag(
        "Maximum seconds from the end of the overload to a request with a normal latency.",
    )] = 5.0
    max_memory_growth: Annotated[float, own_flag(
        "Maximum growth of each --watch process under overload.",
    )] = 0.05
    # fmt: on


class Overload(Burst):
    """Poisson arrivals at 80 % of the sustainable rate, at ten times that rate, at 80 % again.

    Accepted requests must stay within twice the p99 latency at 80 %, the others must be refused
    at once with a time to retry after, memory must not grow, and soon after the overload a
    request must have a normal latency again. Output lengths vary by half around --max-tokens.
    """

    name = "overload"
    about = "Ten times the sustainable load: accepted requests stay fast, the others are refused."
    load = FIXED
    defaults = OverloadFlags(load=0.8, factor=10.0)
    capacity, share = 0.15, 0.5

    @property
    def variants(self) -> Sequence[Variant]:
        return [replace(v, vary=vary_length) for v in self.plain_variants]

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        burst, verdict, own = phases["burst"], super().judge(phases), self.own
        assert isinstance(own, OverloadFlags)
        settled = phases["after"].began + own.max_recovery
        calm = [r for r in self.world.records
                if r.phase == "before" or (r.phase == "after" and r.planned > settled)]  # fmt: skip
        ratio = burst.figures.e2e.p99 / percentile(times(calm, "e2e"), 0.99)
        again, late = verdict.found["normal_again_after_s"], burst.figures.late_p99_ms
        refusal, refused = burst.figures.refusal.p99, burst.figures.refused
        growth = {g.service: g.share for g in self.growth(burst)}
        return ScenarioVerdict(
            {**verdict.found, "p99_ratio": ratio, "memory_growth": growth},
            verdict.lines,
            [*verdict.checks,
             Check("overload", refused > 0, f"{refused} requests were refused"),
             Check("p99 of accepted requests", ratio <= own.max_p99_ratio,
                   f"{ratio:.2f} times that under normal load, bound {own.max_p99_ratio:g}"),
             Check("time to a refusal", not refusal > own.max_refusal,
                   f"{refusal:.0f} ms (p99), bound {own.max_refusal:g} ms"),
             Check("normal latency", again <= own.max_recovery,
                   f"after {again:.1f} s, bound {own.max_recovery:g} s"),
             Check("generator", late <= MAX_LATE_MS,
                   f"{late:.0f} ms late (p99), bound {MAX_LATE_MS:g} ms"),
             *bounded("memory", growth, own.max_memory_growth)],
        )  # fmt: skip
