"""From a rule's name and parameters to the parts that it is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS, CriterionName
from flyspec.rules.resolve import resolve_rule
from verify_service.rules.criteria import Criterion
from verify_service.rules.criteria.divergence import divergence_below, reversed_divergence
from verify_service.rules.criteria.entropy import entropy_gate
from verify_service.rules.criteria.exact import Constant
from verify_service.rules.criteria.margin import margin
from verify_service.rules.criteria.random_control import random_control
from verify_service.rules.criteria.typical import typical
from verify_service.rules.window import Window


@dataclass(frozen=True, slots=True)
class Composition:
    """A rule in parts. Guards and budgets come with the round.

    `target_samples`: at temperature > 0 a match with any of so many samples of the target counts.
    `draws`: at temperature > 0 drafts are judged by speculative sampling instead of by matching.
    """

    criterion: Criterion
    window: Window
    guarded_token_ids: frozenset[int]
    target_samples: int
    draws: bool


def compose(rule: Rule) -> Composition:
    """The parts of a rule. Raises `InvalidArgumentError` for a rule that does not validate."""
    return _compose(resolve_rule(rule))


@lru_cache(maxsize=1024)
def _compose(rule: Rule) -> Composition:
    preset = RULE_PRESETS[rule.name]
    size = rule.fly_window_size or 0
    # Where W counts the mismatch itself, W - 1 matches follow, yet the last W positions of a round
    # are judged exactly, as in FLy's released code. W = 0, which that cannot run, has no window.
    following = max(0, size - preset.counts_mismatch)
    return Composition(
        _CRITERIA[preset.criterion](rule),
        Window(following, reach=size, scope=rule.window_scope or WindowScope.WITHIN_ROUND),
        frozenset(rule.guarded_token_ids),
        preset.samples,
        preset.draws,
    )


_CRITERIA: Mapping[CriterionName, Callable[[Rule], Criterion]] = MappingProxyType(
    {
        "never": lambda rule: Constant(False),
        "entropy": entropy_gate,
        "margin": margin,
        "divergence": divergence_below,
        "reversed divergence": reversed_divergence,
        "typical": typical,
        "random": random_control,
    }
)
"""Each takes its parameters from a resolved rule; by the name that a preset gives its criterion."""
