"""From a rule's name and parameters to the parts that it is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from flyspec.rules import Rule, WindowScope
from flyspec.validation import resolve_rule
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

    `two_samples`: at temperature > 0 a match with either of two samples of the target counts.
    `samples`: at temperature > 0 drafts are judged by speculative sampling instead of by matching.
    """

    criterion: Criterion
    window: Window
    guarded_token_ids: frozenset[int] = frozenset()
    two_samples: bool = False
    samples: bool = False


def compose(rule: Rule, num_draft_tokens: int) -> Composition:
    """The parts of a rule, for a round of K = `num_draft_tokens` up to its first EOS.

    Raises `InvalidArgumentError` for a rule that does not validate.
    """
    return _compose(resolve_rule(rule, num_draft_tokens))


@lru_cache(maxsize=1024)
def _compose(rule: Rule) -> Composition:
    criterion = _CRITERIA[rule.name](rule)
    guarded = frozenset(rule.guarded_token_ids)
    if rule.name == "fly-reference":
        return Composition(criterion, _reference_window(rule), guarded, two_samples=True)
    size = rule.fly_window_size or 0
    window = Window(size, reach=size, scope=rule.window_scope or WindowScope.WITHIN_ROUND)
    return Composition(criterion, window, guarded, samples=rule.name == "rejection")


def _never(_: Rule) -> Criterion:
    return Constant(False)


def _fly(rule: Rule) -> Criterion:
    assert rule.entropy_measure is not None
    assert rule.fly_entropy_threshold is not None
    raw = rule.name == "fly-reference"
    if raw and rule.fly_entropy_threshold <= REFERENCE_GATE_OFF:
        return Constant(True)
    return entropy_criterion(
        rule.entropy_measure, rule.fly_entropy_threshold, rule.fly_entropy_top_k, raw=raw
    )


def _reference_window(rule: Rule) -> Window:
    """As in FLy's released code, whose `win_len` W counts the mismatch itself.

    So W - 1 matches follow, yet the last W positions of a round are judged exactly. W = 0, which
    the code cannot run, accepts whatever passes the gate, as elsewhere.
    """
    size = rule.fly_window_size or 0
    return Window(max(0, size - 1), reach=size)


def _margin(rule: Rule) -> Criterion:
    return Margin(rule.margin_threshold) if rule.margin_threshold else Constant(False)


def _fuzzy(rule: Rule) -> Criterion:
    if not rule.divergence_threshold:
        return Constant(False)  # nothing is below 0
    assert rule.divergence is not None
    return DivergenceBelow(rule.divergence, rule.divergence_threshold, rule.divergence_top_k or 0)


def _fuzzy_reference(rule: Rule) -> Criterion:
    assert rule.divergence is not None
    assert rule.divergence_threshold is not None
    return ReversedDivergence(rule.divergence, rule.divergence_threshold)


def _typical(rule: Rule) -> Criterion:
    assert rule.typical_epsilon is not None
    assert rule.typical_delta is not None
    return Typical(rule.typical_epsilon, rule.typical_delta)


def _random(rule: Rule) -> Criterion:
    return Random(rule.random_acceptance) if rule.random_acceptance else Constant(False)


_CRITERIA: Mapping[str, Callable[[Rule], Criterion]] = MappingProxyType(
    {
        "exact": _never,
        "fly": _fly,
        "fly-paper": _fly,
        "fly-reference": _fly,
        "margin": _margin,
        "fuzzy": _fuzzy,
        "fuzzy-reference": _fuzzy_reference,
        "rejection": _never,  # greedy; else the ratio p / q decides
        "typical": _typical,
        "random": _random,
    }
)
