"""More and more load: where throughput stops growing and latency begins to."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from loadtest.measures import knee
from loadtest.scenarios.base import Scenario, describe, number_list, variant_of
from loadtest.summary import PhaseResult
from loadtest.work import Closed, Open, Phase

WARM_UP = 0.05
"""Share of the time."""


class Ramp(Scenario):
    """Steps of load, a curve for each K; where there are two, they take turns at every step."""

    name = "ramp"
    about = "steps of load; finds the knee of throughput against latency"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The steps."""
        steps = parser.add_mutually_exclusive_group()
        steps.add_argument(
            "--steps", type=number_list, default=[1, 2, 4, 8, 16, 32], metavar="N,N,...",
            help="users of each step, a closed loop (default 1,2,4,8,16,32)",
        )  # fmt: skip
        steps.add_argument(
            "--rates", type=number_list, metavar="R,R,...",
            help="instead: requests a second of each step, Poisson arrivals",
        )  # fmt: skip
        parser.add_argument(
            "--against", type=int, metavar="K",
            help="a second curve with this K; 0 is without speculation",
        )  # fmt: skip

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """A warm-up, then the steps."""
        ways = [self.options]
        if self.args.against is not None:
            ways.append(replace(self.options, num_speculative_tokens=self.args.against))
        loads: list[Closed | Open] = (
            [Open(rate) for rate in self.args.rates]
            if self.args.rates
            else [Closed(round(users)) for users in self.args.steps]
        )
        few = loads[len(loads) // 2]
        yield Phase("warm-up", few, WARM_UP * self.seconds, [variant_of(ways[0])], judged=False)
        each = (1 - WARM_UP) * self.seconds / (len(loads) * len(ways))
        for step, load in enumerate(loads):
            # Whoever comes second in one step comes first in the next.
            for options in ways if step % 2 == 0 else ways[::-1]:
                series = describe(options)
                name = f"{load}, {series}" if len(ways) > 1 else str(load)
                yield Phase(name, load, each, [variant_of(options)], series=series)

    def found(self, done: Sequence[PhaseResult]) -> dict[str, Any]:
        """The knee of each curve if it was reached, and the most that came out."""
        curves: dict[str, Any] = {}
        for series in dict.fromkeys(r.phase.series for r in done if r.phase.series):
            points = [r for r in done if r.phase.series == series]
            curves[series] = {
                "last_load": str(points[-1].phase.load),
                "most_tokens_per_s": max(p.rate for p in points),
            }
            if (at := knee(points)) is not None:
                curves[series] |= {
                    "knee": points[at].phase.name,
                    "knee_load": str(points[at].phase.load),
                    "knee_tokens_per_s": points[at].rate,
                    "knee_e2e_p50_ms": points[at].figures.e2e.p50,
                    "knee_e2e_p99_ms": points[at].figures.e2e.p99,
                }
        return {"curves": curves}
