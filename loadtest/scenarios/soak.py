"""The same load for a long time, under which nothing may grow."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from flyspec.client import GenerateOptions
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.goals import Check
from loadtest.measures import percentile
from loadtest.prompts import VARIED, Source
from loadtest.record import Record
from loadtest.scenarios.base import (
    DRAFTER,
    TARGET,
    LoadFlags,
    Scenario,
    ScenarioVerdict,
    bounded,
    own_flag,
)
from loadtest.summary import PhaseResult, times
from loadtest.work import LoadPhase, Open, Variant

CALIBRATE_S, CALIBRATE = 60.0, 0.1
"""Time to measure the sustainable rate: a share of the whole test, at most so many seconds."""
SETTLE_S = 5.0
"""Requests sent so soon after a service is back may still fail because of its absence."""
RULES = ("exact", "fly", "fly-paper", "margin", "fuzzy", "typical", "rejection", "random")
DRAFTERS = ("", *(kind for kind in DRAFTER_KINDS if kind not in NEED_DATASTORE))


# fmt: off
@dataclass(frozen=True)
class SoakFlags(LoadFlags):
    """The load, its disturbances, and the bounds."""

    cancelled: Annotated[float, own_flag("Share of requests that are cancelled.")] = 0.05
    cancel_after: Annotated[float, own_flag(
        "Mean seconds until they are cancelled, unless they end before.", min=0.001,
    )] = 1.0
    varied: Annotated[bool, own_flag(
        "Draw every request's rule, drafter, K, sampling and length (up to --max-tokens), and ask "
        f"for {VARIED} prompts.",
    )] = False
    draft_kills: Annotated[int, own_flag(
        "Kill the draft service this many times (it must be restarted; needs --watch draft=PID).",
        min=0,
    )] = 0
    verify_kills: Annotated[int, own_flag("Same for the verify service.", min=0)] = 0
    max_memory_growth: Annotated[float, own_flag(
        "Maximum growth of each --watch process, once warm.",
    )] = 0.05
    max_latency_growth: Annotated[float, own_flag(
        "Maximum growth of p50 and p99 latency from the middle third to the last (without kills).",
    )] = 0.25
    # fmt: on


class Soak(Scenario[SoakFlags]):
    """Poisson arrivals at a share of the sustainable rate; some clients cancel mid-stream."""

    name = "soak"
    about = "Steady load for a long time; neither memory nor latency may grow."
    defaults = SoakFlags()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outages: list[tuple[str, float, float]] = []

    @classmethod
    def sources(cls, own: SoakFlags) -> Sequence[Source]:
        return (Source(VARIED),) if own.varied else super().sources(own)

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(
            done, min(CALIBRATE_S, CALIBRATE * self.seconds)
        )
        rate *= self.own.load if self.own.rate is None else 1.0
        variants = self.plain_variants
        if self.own.varied:
            variants = (Variant("varied", self.options, vary=vary_everything),)
        yield LoadPhase(
            "soak", Open(rate), seconds, variants, cancelled=self.own.cancelled,
            cancel_after_s=self.own.cancel_after, meanwhile=lambda: self._kill(seconds),
        )  # fmt: skip

    def _kill(self, seconds: float) -> None:
        """Kill services, at even intervals."""
        began = self.world.control.now()
        plan = [
            (seconds * (i + 1) / (times_ + 1), name)
            for name, times_ in ((DRAFTER, self.own.draft_kills), (TARGET, self.own.verify_kills))
            for i in range(times_)
        ]
        for at, name in sorted(plan):
            time.sleep(max(0.0, began + at - self.world.control.now()))
            if self.world.control.opened.is_set():
                self.outages.append((name, *self.world.kill(name)))

    def excuses(self, record: Record) -> bool:
        return any(
            record.sent <= ready + SETTLE_S and record.ended >= killed
            for _, killed, ready in self.outages
        )

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        soak, own, latency = phases["soak"], self.own, dict[str, float]()
        growth = self.world.sampler.growth(soak.began, soak.sent_until)
        memory = {g.service: g.share for g in growth}
        of_third: list[list[Record]] = [[], [], []]
        for record in self.world.control.records:
            if record.phase == "soak":
                third = 3 * (record.planned - soak.began) / (soak.sent_until - soak.began)
                of_third[min(2, int(third))].append(record)
        middle, last = (times(records, "e2e") for records in of_third[1:])
        if middle and last:
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                latency[name] = percentile(last, share) / percentile(middle, share) - 1
        checks = bounded("memory", memory, own.max_memory_growth)
        if kills := own.draft_kills + own.verify_kills:
            done = len(self.outages)
            checks.append(Check("kills", done == kills, f"{done} of {kills} took place"))
        else:
            checks += bounded("latency", latency, own.max_latency_growth)
        found = {
            "memory_growth": memory,
            "latency_growth": latency,
            "memory": [
                {"process": g.service, "MiB": g.mib, "MiB per 1,000 requests": g.mib_per_1000}
                for g in growth
            ],
            "outages": [
                {"killed": name, "at_s": killed, "back_after_s": ready - killed}
                for name, killed, ready in self.outages
            ],
        }
        return ScenarioVerdict(found, checks=checks)


def vary_everything(rng: random.Random, options: GenerateOptions) -> GenerateOptions:
    """Draw every option of a request."""
    return replace(
        options,
        sampling=SamplingParams(rng.choice([0.0, 0.0, 0.8]), rng.choice([1.0, 0.9])),
        seed=rng.randrange(1 << 30),
        max_tokens=rng.randint(1, options.max_tokens or 1),
        ignore_eos=rng.random() < 0.5,
        drafter=rng.choice(DRAFTERS),
        rule=Rule(rng.choice(RULES)),
        num_speculative_tokens=rng.choice([0, 2, 4, 8, 15]),
        logprobs=rng.choice([None, None, 2]),
    )
