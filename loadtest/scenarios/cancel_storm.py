"""Clients that come in numbers and go away again: nothing of them may be left."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from loadtest.goals import Check
from loadtest.scenarios.base import Scenario
from loadtest.summary import PhaseResult
from loadtest.work import Closed, Open, Phase

MIN_RATE = 10.0
"""Requests a second: fewer are no storm."""


class CancelStorm(Scenario):
    """A closed loop, then a storm of requests that are all given up, then the loop again.

    Goals are about the loop before and after.
    """

    name = "cancel-storm"
    about = "a storm of requests that are given up; nothing may be left of them"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The storm."""
        cls.add_users(parser, 4, "before and after")
        parser.add_argument(
            "--factor", type=float, default=10.0,
            help="requests a second of the storm, times those of before (default 10)",
        )  # fmt: skip
        parser.add_argument(
            "--cancel-after", type=float, default=0.3, metavar="S",
            help="seconds until a client leaves, on average, exponential (default 0.3)",
        )  # fmt: skip

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """Before, storm, after."""
        loop = Closed(self.users)
        yield Phase("before", loop, 0.25 * self.seconds, self.plain_variants)
        rate = max(MIN_RATE, self.args.factor * done[-1].figures.requests_per_s)
        yield Phase("storm", Open(rate), 0.5 * self.seconds, self.plain_variants, judged=False,
                    cancelled=1.0, cancel_after_s=self.args.cancel_after)  # fmt: skip
        yield Phase("after", loop, 0.25 * self.seconds, self.plain_variants)

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """The storm took place, and others are served after it."""
        storm = self.by_name(done, "storm")
        left = storm.figures.cancelled if storm else 0
        return [
            Check("storm", left > 0, f"{left} requests were given up by their clients"),
            self.served_after(done, "storm"),
        ]
