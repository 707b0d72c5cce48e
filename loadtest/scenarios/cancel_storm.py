"""Many requests that are cancelled: they may leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from loadtest.goals import Check
from loadtest.scenarios.base import Scenario, ScenarioVerdict, UserFlags, own_flag, served
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase, Open

MIN_RATE = 10.0
"""Requests per second: fewer are no storm."""


# fmt: off
@dataclass(frozen=True)
class StormFlags(UserFlags):
    """The storm."""

    factor: Annotated[float, own_flag(
        "Rate of the storm, as a multiple of the users' requests per second before it.",
    )] = 10.0
    cancel_after: Annotated[float, own_flag(
        "Mean seconds until a request of the storm is cancelled.", min=0.001,
    )] = 0.3
    # fmt: on


class CancelStorm(Scenario[StormFlags]):
    """A closed loop, then a storm of requests that are all cancelled, then the loop again.

    Goals apply to the loop before and after.
    """

    name = "cancel-storm"
    about = "A storm of cancelled requests; they may leave nothing behind."
    defaults = StormFlags(users=4)

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        loop = Closed(self.users)
        yield LoadPhase("before", loop, 0.25 * self.seconds, self.plain_variants)
        rate = max(MIN_RATE, self.own.factor * done[-1].figures.requests_per_s)
        yield LoadPhase("storm", Open(rate), 0.5 * self.seconds, self.plain_variants, judged=False,
                        cancelled=1.0, cancel_after_s=self.own.cancel_after)  # fmt: skip
        yield LoadPhase("after", loop, 0.25 * self.seconds, self.plain_variants)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        left = phases["storm"].figures.cancelled
        storm = Check("storm", left > 0, f"{left} requests were given up by their clients")
        return ScenarioVerdict(checks=[storm, served(phases["after"], "storm")])
