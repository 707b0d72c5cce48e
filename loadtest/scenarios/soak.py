"""The same load for a long time: does anything grow?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from loadtest.goals import Check
from loadtest.measures import growth, percentile
from loadtest.record import Record
from loadtest.scenarios.base import Scenario
from loadtest.summary import PhaseResult, times
from loadtest.work import Open, Phase

CALIBRATE_S = 60.0
CALIBRATE = 0.1
"""Time to find what can be sustained: this share of all, and at most so many seconds."""


class Soak(Scenario):
    """Poisson arrivals at a share of what can be sustained; some clients leave in mid-stream."""

    name = "soak"
    about = "a steady load for long; memory and latency must not grow"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The load and the bounds."""
        cls.add_rate(parser, "(default: see --load)", "that can be sustained, measured first")
        parser.add_argument(
            "--cancelled", type=float, default=0.05,
            help="share of the requests that their client gives up (default 0.05)",
        )  # fmt: skip
        parser.add_argument(
            "--max-memory-growth", type=float, default=0.05,
            help="of each --watch process, last third against middle third (default 0.05)",
        )  # fmt: skip
        parser.add_argument(
            "--max-latency-growth", type=float, default=0.25,
            help="of p50 and p99 end to end, likewise (default 0.25)",
        )  # fmt: skip

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """What can be sustained, then a share of it."""
        calibrate = min(CALIBRATE_S, CALIBRATE * self.seconds)
        rate, seconds = yield from self.sustainable(done, calibrate)
        rate *= self.args.load if self.args.rate is None else 1.0
        yield Phase(
            "soak", Open(rate), seconds, self.plain_variants,
            cancelled=self.args.cancelled, cancel_after_s=1.0,
        )  # fmt: skip

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """Nothing grows."""
        found, args = self.found(done), self.args
        return [
            Check(f"{what} of {name}", share <= bound, f"{share:+.1%}, bound {bound:+.0%}")
            for what, bound in (("memory", args.max_memory_growth),
                                ("latency", args.max_latency_growth))
            for name, share in found[f"{what}_growth"].items()
        ]  # fmt: skip

    def found(self, done: Sequence[PhaseResult]) -> dict[str, Any]:
        """Growth of memory, by process, and of latency: last third against middle third."""
        soak = self.by_name(done, "soak")
        if soak is None:
            return {"memory_growth": {}, "latency_growth": {}}
        within = [m for m in self.world.memory if soak.began <= m.seconds <= soak.sent_until]
        memory = {s: growth([m.mib for m in within if m.service == s])
                  for s in sorted({m.service for m in within})}  # fmt: skip
        third = (soak.sent_until - soak.began) / 3
        records = [r for r in self.world.records if r.phase == "soak"]
        middle, last = (
            self._latencies(records, soak.began + i * third, soak.began + (i + 1) * third)
            for i in (1, 2)
        )
        latency = {}
        if middle and last:
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                latency[name] = percentile(last, share) / percentile(middle, share) - 1
        return {
            "memory_growth": {s: share for s, share in memory.items() if share is not None},
            "latency_growth": latency,
        }

    @staticmethod
    def _latencies(records: Sequence[Record], begin: float, end: float) -> list[float]:
        return times([r for r in records if begin <= r.planned < end], "e2e")
