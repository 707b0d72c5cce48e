"""From a rule's name and parameters to the parts that it is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from verify_service.rules.criteria import Criterion
from verify_service.rules.criteria.divergence import DivergenceBelow, ReversedDivergence
from verify_service.rules.criteria.entropy import entropy_criterion
from verify_service.rules.criteria.exact import Constant
from verify_service.rules.criteria.margin import Margin
from verify_service.rules.criteria.random_control import Random
from verify_service.rules.criteria.typical import Typical
from verify_service.rules.window import Window

REFERENCE_GATE_OFF = 0.01
"""FLy's released code drops its gate at this threshold and below."""


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


def _entropy(rule: Rule) -> Criterion:
    assert rule.entropy_measure is not None
    assert rule.fly_entropy_threshold is not None
    raw = RULE_PRESETS[rule.name].raw
    if raw and rule.fly_entropy_threshold <= REFERENCE_GATE_OFF:
        return Constant(True)
    return entropy_criterion(
        rule.entropy_measure, rule.fly_entropy_threshold, rule.fly_entropy_top_k, raw=raw
    )


def _margin(rule: Rule) -> Criterion:
    return Margin(rule.margin_threshold) if rule.margin_threshold else Constant(False)


def _divergence(rule: Rule) -> Criterion:
    if not rule.divergence_threshold:
        return Constant(False)  # nothing is below 0
    assert rule.divergence is not None
    return DivergenceBelow(rule.divergence, rule.divergence_threshold, rule.divergence_top_k or 0)


def _reversed_divergence(rule: Rule) -> Criterion:
    assert rule.divergence is not None
    assert rule.divergence_threshold is not None
    top_k = rule.divergence_top_k or 0
    return ReversedDivergence(rule.divergence, rule.divergence_threshold, top_k)


def _typical(rule: Rule) -> Criterion:
    assert rule.typical_epsilon is not None
    assert rule.typical_delta is not None
    return Typical(rule.typical_epsilon, rule.typical_delta)


def _random(rule: Rule) -> Criterion:
    return Random(rule.random_acceptance) if rule.random_acceptance else Constant(False)


_CRITERIA: Mapping[str, Callable[[Rule], Criterion]] = MappingProxyType(
    {
        "never": lambda rule: Constant(False),
        "entropy": _entropy,
        "margin": _margin,
        "divergence": _divergence,
        "reversed divergence": _reversed_divergence,
        "typical": _typical,
        "random": _random,
    }
)
"""By the name that a preset gives its criterion."""
