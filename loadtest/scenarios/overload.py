"""For a while, far more load than can be served."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from flyspec.client import GenerateOptions
from loadtest.goals import Check
from loadtest.measures import duration, percentile
from loadtest.scenarios.base import FIXED, LoadFlags, Scenario, ScenarioVerdict, bounded, own_flag
from loadtest.summary import PhaseResult, times
from loadtest.work import LoadPhase, Open

MAX_LATE_MS = 100.0
"""p99 of how late requests are sent; beyond it, the generator measures itself."""
CAPACITY, OVERLOAD = 0.15, 0.5
"""Shares of the time: to measure the sustainable rate; of the overload, of what is then left."""


# fmt: off
@dataclass(frozen=True)
class OverloadFlags(LoadFlags):
    """The overload, and the bounds."""

    factor: Annotated[float, own_flag("Overload, as a multiple of the sustainable rate.")] = 10.0
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


class Overload(Scenario[OverloadFlags]):
    """Poisson arrivals at 80 % of the sustainable rate, at ten times that rate, at 80 % again.

    Accepted requests must stay within twice the p99 latency at 80 %, the others must be refused
    at once with a time to retry after, memory must not grow, and soon after the overload a
    request must have a normal latency again. Output lengths vary by half around --max-tokens.
    Goals apply before and after the overload.
    """

    name = "overload"
    about = "Ten times the sustainable load: accepted requests stay fast, the others are refused."
    load = FIXED
    defaults = OverloadFlags(load=0.8)

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(done, CAPACITY * self.seconds)
        normal, rest = Open(self.own.load * rate), (1 - OVERLOAD) / 2 * seconds
        variants = [replace(v, vary=vary_length) for v in self.plain_variants]
        yield LoadPhase("before", normal, rest, variants)
        yield LoadPhase("burst", Open(self.own.factor * rate), OVERLOAD * seconds, variants,
                        judged=False, drain=False)  # fmt: skip
        yield LoadPhase("after", normal, rest, variants)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        burst, after, own = phases["burst"], phases["after"], self.own
        normal, records = phases["before"].figures.e2e.p99, self.world.control.records
        again = min((r.planned - burst.sent_until for r in records if r.phase == "after"
                     and (r.metric("e2e") or math.inf) <= normal), default=math.inf)  # fmt: skip
        settled = after.began + own.max_recovery
        calm = [r for r in records
                if r.phase == "before" or (r.phase == "after" and r.planned > settled)]  # fmt: skip
        ratio = burst.figures.e2e.p99 / percentile(times(calm, "e2e"), 0.99)
        late, refusal = burst.figures.late_p99_ms, burst.figures.refusal.p99
        refused = sum(p.figures.refused for p in phases.values())
        silent = sum(p.figures.refusals_without_retry for p in phases.values())
        sampler = self.world.sampler
        growth = {g.service: g.share for g in sampler.growth(burst.began, burst.sent_until)}
        found = {"normal_e2e_ms": normal, "normal_again_after_s": again, "p99_ratio": ratio,
                 "memory_growth": growth}  # fmt: skip
        line = f"a latency is normal up to {duration(normal)}, p99 before the burst"
        return ScenarioVerdict(found, [line], [
            Check("refusals", silent == 0, f"{silent} of {refused} did not say when to retry"),
            Check("after", after.figures.complete > 0,
                  f"{after.figures.complete} requests completed after the burst"),
            Check("overload", burst.figures.refused > 0,
                  f"{burst.figures.refused} requests were refused"),
            Check("p99 of accepted requests", ratio <= own.max_p99_ratio,
                  f"{ratio:.2f} times that under normal load, bound {own.max_p99_ratio:g}"),
            Check("time to a refusal", not refusal > own.max_refusal,
                  f"{refusal:.0f} ms (p99), bound {own.max_refusal:g} ms"),
            Check("normal latency", again <= own.max_recovery,
                  f"after {again:.1f} s, bound {own.max_recovery:g} s"),
            Check("generator", late <= MAX_LATE_MS,
                  f"{late:.0f} ms late (p99), bound {MAX_LATE_MS:g} ms"),
            *bounded("memory", growth, own.max_memory_growth),
        ])  # fmt: skip


def vary_length(rng: random.Random, options: GenerateOptions) -> GenerateOptions:
    """Draw an output's length from half to one and a half times `max_tokens`."""
    mean = options.max_tokens or 1
    return replace(options, max_tokens=rng.randint(max(1, mean // 2), max(1, 3 * mean // 2)))
