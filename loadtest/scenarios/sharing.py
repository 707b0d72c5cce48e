"""Several orchestrators over the same slots, compared with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from loadtest.goals import Check
from loadtest.record import Record
from loadtest.scenarios.base import (
    FIXED,
    RateFlags,
    Scenario,
    ScenarioVerdict,
    own_flag,
    polite,
    vary_length,
)
from loadtest.summary import PhaseResult
from loadtest.work import LoadPhase, Open

ONE, SEVERAL = "one", "several"


# fmt: off
@dataclass(frozen=True)
class SharingFlags(RateFlags):
    """The load, and the bounds."""

    factor: Annotated[float, own_flag("Load, as a multiple of the sustainable rate.")] = 1.5
    max_ttft_ratio: Annotated[float, own_flag(
        "Maximum p99 TTFT with several orchestrators, as a multiple of that with one.",
    )] = 1.5
    max_overtaken: Annotated[float, own_flag(
        "Maximum seconds by which a later request may overtake an earlier one.",
    )] = 1.0
    # fmt: on


class Sharing(Scenario[SharingFlags]):
    """1.5 times the sustainable rate, to the first address, then to all of --address in turn.

    The addresses are those of orchestrators over the same services. With several of them, p99 time
    to first token must be within 1.5 times that with one, slots must be given in the order of
    arrival to within a second, and excess requests must be refused with a time to retry after.
    """

    name = "sharing"
    about = "Several orchestrators share the same slots: as fast as one, first come, first served."
    load = FIXED
    defaults = SharingFlags()

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        rate, seconds = yield from self.sustainable(done, 0.15 * self.seconds, addresses=1)
        variants = [replace(v, vary=vary_length) for v in self.plain_variants]
        load = Open(self.own.factor * rate)
        yield LoadPhase(ONE, load, 0.5 * seconds, variants, judged=False, addresses=1)
        yield LoadPhase(SEVERAL, load, 0.5 * seconds, variants, judged=False)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        one, several, own = phases[ONE].figures, phases[SEVERAL].figures, self.own
        ratio = several.ttft.p99 / one.ttft.p99
        overtaken = overtaken_s([r for r in self.world.records if r.phase == SEVERAL])
        return ScenarioVerdict({"ttft_ratio": ratio, "overtaken_s": overtaken}, checks=[
            Check("p99 TTFT", ratio <= own.max_ttft_ratio,
                  f"{ratio:.2f} times that with one orchestrator, bound {own.max_ttft_ratio:g}"),
            Check("order", overtaken <= own.max_overtaken,
                  f"overtaken by requests that arrived up to {overtaken:.2f} s later, "
                  f"bound {own.max_overtaken:g} s"),
            Check("load", several.refused > 0, f"{several.refused} requests were refused"),
            polite(phases.values()),
        ])  # fmt: skip


def overtaken_s(records: Sequence[Record]) -> float:
    """Return the longest time by which a later request overtook an earlier one, in seconds."""
    served = sorted((r.started, r.sent) for r in records if r.started is not None)
    worst = latest = 0.0
    for _, sent in served:
        worst, latest = max(worst, latest - sent), max(latest, sent)
    return worst
