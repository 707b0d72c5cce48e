"""Composes a rule's parts from its name and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from flyspec.engine.autojudge import AutoJudge
from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS, CriterionName, RulePreset
from verify_service.rules.criteria import Constant, Criterion, Loosening
from verify_service.rules.criteria.draft import (
    cactus,
    divergence_below,
    divergence_if_unsure,
    ensemble_choice,
    ensemble_ratio,
    reversed_divergence,
)
from verify_service.rules.criteria.target import (
    entropy_gate,
    importance,
    margin,
    mars,
    random_control,
    relaxed,
    typical,
)
from verify_service.rules.window import Window


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of a rule. Guards and budgets come with the round.

    Where it samples, drafts are judged by p / q, loosened if there is a `loosening`, instead of by
    the criterion.
    """

    preset: RulePreset
    criterion: Criterion
    loosening: Loosening | None
    window: Window
    guarded_token_ids: frozenset[int]


@lru_cache(maxsize=1024)
def compose(rule: Rule, judge: AutoJudge | None = None) -> Composition:
    """Compose a resolved rule, of which `autojudge` alone needs the `judge`.

    Raises `InvalidArgumentError` if it is missing.
    """
    preset = RULE_PRESETS[rule.name]
    return Composition(
        preset,
        _criterion(preset.criterion, rule, judge),
        loosening(rule) if (loosening := _LOOSENINGS.get(preset.criterion)) else None,
        window_of(rule),
        frozenset(rule.guarded_token_ids),
    )


def window_of(rule: Rule) -> Window:
    """Return a resolved rule's window."""
    size = rule.fly_window_size or 0
    # Where W counts the mismatch itself, W - 1 matches follow, yet the last W positions of a round
    # are judged exactly, as in FLy's released code. W = 0, which that cannot run, means no window.
    following = max(0, size - RULE_PRESETS[rule.name].counts_mismatch)
    return Window(following, reach=size, scope=rule.window_scope or WindowScope.WITHIN_ROUND)


def _criterion(name: CriterionName, rule: Rule, judge: AutoJudge | None) -> Criterion:
    return importance(rule, judge) if name == "importance" else _CRITERIA[name](rule)


_CRITERIA: Mapping[CriterionName, Callable[[Rule], Criterion]] = MappingProxyType(
    {
        "never": lambda rule: Constant(False),
        "entropy": entropy_gate,
        "margin": margin,
        "divergence": divergence_below,
        "reversed divergence": reversed_divergence,
        "divergence if unsure": divergence_if_unsure,
        "typical": typical,
        "relaxed": relaxed,
        "mars": mars,
        "random": random_control,
        "ensemble": ensemble_choice,
        "cactus": lambda rule: Constant(False),  # both distributions are a single token
    }
)
"""Constructors of criteria from a resolved rule, by the preset's name for the criterion."""

_LOOSENINGS: Mapping[CriterionName, Callable[[Rule], Loosening]] = MappingProxyType(
    {"ensemble": ensemble_ratio, "cactus": cactus}
)
"""The same for what loosens speculative sampling."""
