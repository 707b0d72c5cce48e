"""Far more than can be served, for a short time, out of a calm load."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from loadtest.goals import Check
from loadtest.scenarios.base import Scenario
from loadtest.summary import PhaseResult
from loadtest.work import Open, Phase


class Burst(Scenario):
    """Poisson arrivals: calm, a burst, calm again; what is too much must be refused and told when.

    Goals are about the calm before and after.
    """

    name = "burst"
    about = "a burst of far more than can be served, and the calm before and after"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The loads."""
        cls.add_rate(parser, "that can be sustained (default: measured first)", "in the calm")
        parser.add_argument(
            "--factor", type=float, default=8.0, help="of it in the burst (default 8)"
        )

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """What can be sustained; before, burst, after."""
        rate, seconds = yield from self.sustainable(done, 0.2 * self.seconds)
        calm = Open(self.args.load * rate)
        yield Phase("before", calm, 0.4 * seconds, self.plain_variants)
        yield Phase("burst", Open(self.args.factor * rate), 0.2 * seconds, self.plain_variants,
                    judged=False, drain=False)  # fmt: skip
        yield Phase("after", calm, 0.4 * seconds, self.plain_variants)

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """Refusals are polite, and the burst is forgotten."""
        silent = sum(r.figures.refusals_without_retry for r in done)
        refused = sum(r.figures.refused for r in done)
        return [
            Check("refusals", silent == 0,
                  f"{silent} of {refused} refusals did not say when to ask again"),
            self.served_after(done, "burst"),
        ]  # fmt: skip

    def found(self, done: Sequence[PhaseResult]) -> dict[str, Any]:
        """How soon a request had a normal latency again: at most p99 of before."""
        before, burst = self.by_name(done, "before"), self.by_name(done, "burst")
        if before is None or burst is None:
            return {}
        normal = before.figures.e2e.p99
        again = [r.planned - burst.sent_until for r in self.world.records
                 if r.phase == "after" and (r.metric("e2e") or 2 * normal) <= normal]  # fmt: skip
        return {"normal_e2e_ms": normal, "normal_again_after_s": min(again, default=None)}
