"""Requests of different rules at once, as many tenants of one installation make them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flyspec.rules import Rule
from loadtest.goals import Check
from loadtest.scenarios.base import Scenario, variant_of
from loadtest.summary import PhaseResult
from loadtest.work import Closed, Phase, Variant

DEFAULT_RULES = "plain,exact,fly,fly-paper,margin,fuzzy,typical,rejection"
PLAIN = "plain"


class MixedRules(Scenario):
    """A closed loop in which every request draws its rule; `plain` is K = 0."""

    name = "mixed-rules"
    about = "requests of different acceptance rules, and plain ones, at once"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The rules."""
        cls.add_users(parser, 8, "at once")
        parser.add_argument(
            "--rules", default=DEFAULT_RULES, metavar="NAME,NAME,...",
            help=f"`plain` is without speculation (default {DEFAULT_RULES})",
        )  # fmt: skip

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[Phase]:
        """A warm-up, and the mix."""
        variants = tuple(self._variant(name.strip()) for name in self.args.rules.split(","))
        loop = Closed(self.users)
        yield Phase("warm-up", loop, 0.1 * self.seconds, variants, judged=False)
        yield Phase("mix", loop, 0.9 * self.seconds, variants)

    def checks(self, done: Sequence[PhaseResult]) -> list[Check]:
        """Everybody is served."""
        mix = self.by_name(done, "mix")
        starved = [n for n, f in mix.by_variant.items() if f.sent and not f.complete] if mix else []
        return [Check("rules", not starved, f"never completed: {', '.join(starved) or 'none'}")]

    def _variant(self, name: str) -> Variant:
        if name == PLAIN:
            return Variant("plain", replace(self.options, num_speculative_tokens=0))
        return variant_of(replace(self.options, rule=Rule(name)))
