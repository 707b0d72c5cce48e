"""Requests with different rules at the same time, as from many tenants of one installation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from flyspec.rules import Rule
from loadtest.goals import Check
from loadtest.scenarios.base import Scenario, ScenarioVerdict, UserFlags, own_flag, variant_of
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase, Variant

PLAIN = "plain"


@dataclass(frozen=True)
class MixFlags(UserFlags):
    """The rules."""

    rules: Annotated[
        str, own_flag(f"Rules, comma-separated; {PLAIN} is K = 0.", metavar="NAME,...")
    ] = f"{PLAIN}, exact, fly, fly-paper, margin, fuzzy, typical, rejection"


class MixedRules(Scenario[MixFlags]):
    """A closed loop in which every request draws its rule at random; `plain` is K = 0."""

    name = "mixed-rules"
    about = "Concurrent requests with different acceptance rules, and with plain decoding."
    defaults = MixFlags()

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        variants = tuple(self._variant(name.strip()) for name in self.own.rules.split(","))
        loop = Closed(self.users)
        yield LoadPhase("warm-up", loop, 0.1 * self.seconds, variants, judged=False)
        yield LoadPhase("mix", loop, 0.9 * self.seconds, variants)

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        starved = [n for n, f in phases["mix"].by_variant.items() if f.sent and not f.complete]
        said = f"never completed: {', '.join(starved) or 'none'}"
        return ScenarioVerdict(checks=[Check("rules", not starved, said)])

    def _variant(self, name: str) -> Variant:
        if name == PLAIN:
            return Variant("plain", replace(self.options, num_speculative_tokens=0))
        return variant_of(replace(self.options, rule=Rule(name)))
