"""Ranges of what a request may ask for, and the acceptance rules' presets. No torch here.

The orchestrator checks requests with it and the verify service fills rules in with it. Each message
names the field, what is allowed and what was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from flyspec.errors import InvalidArgumentError
from flyspec.types import EntropyMeasure, Rule, SamplingParams

MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_WINDOW_SIZE = 1024
MIN_ENTROPY_TOP_K = 2
MAX_ENTROPY_TOP_K = 1024
MAX_ENTROPY_NATS = 20.0
DEFAULT_ENTROPY_TOP_K = 3
DEFAULT_WINDOW_SIZE = 6


@dataclass(frozen=True, slots=True)
class RulePreset:
    """What a rule's name stands for; `fly` False means that it has none of FLy's parameters.

    `window_size` None is min(6, K - 1), at least 0, for K drafted tokens.
    """

    fly: bool
    window_size: int | None = None
    entropy_threshold: float | None = None
    entropy_measure: EntropyMeasure | None = None


RULE_PRESETS: Mapping[str, RulePreset] = MappingProxyType(
    {
        "exact": RulePreset(fly=False),
        "fly": RulePreset(True, None, 0.3, EntropyMeasure.TOP_K),
        "fly-paper": RulePreset(True, DEFAULT_WINDOW_SIZE, 0.3, EntropyMeasure.NORMALIZED),
        "fly-reference": RulePreset(True, DEFAULT_WINDOW_SIZE, 0.3, EntropyMeasure.TOP_K),
    }
)


def validate_sampling(sampling: SamplingParams) -> None:
    """Refuse sampling parameters out of range."""
    temperature = sampling.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidArgumentError(
            f"sampling.temperature must be 0 (greedy) or between {MIN_TEMPERATURE:g} and "
            f"{MAX_TEMPERATURE:g}, got {temperature:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidArgumentError(
            f"sampling.top_p must be greater than 0 and at most 1, got {sampling.top_p:g}"
        )
    _check_integer("sampling.top_k", sampling.top_k, 0, MAX_TOP_K, " (0 keeps every token)")


def validate_rule(rule: Rule) -> None:
    """Refuse an unknown rule, a parameter that does not apply to it, or one out of range."""
    preset = RULE_PRESETS.get(rule.name)
    if preset is None:
        raise InvalidArgumentError(
            f"rule.name must be one of {', '.join(RULE_PRESETS)}, got {rule.name!r}"
        )
    if not preset.fly:
        for name in _FLY_FIELDS:
            if getattr(rule, name) is not None:
                raise InvalidArgumentError(f"rule.{name} does not apply to the rule {rule.name!r}")
        return
    if rule.fly_window_size is not None:
        _check_integer("rule.fly_window_size", rule.fly_window_size, 0, MAX_WINDOW_SIZE)
    measure = rule.entropy_measure or preset.entropy_measure
    if measure is EntropyMeasure.NORMALIZED:
        _check_threshold(rule.fly_entropy_threshold, 1.0, "normalized measure")
        if rule.fly_entropy_top_k is not None:
            raise InvalidArgumentError(
                "rule.fly_entropy_top_k does not apply to the normalized measure"
            )
    else:
        _check_threshold(rule.fly_entropy_threshold, MAX_ENTROPY_NATS, "top_k measure, in nats")
        if rule.fly_entropy_top_k is not None:
            low, high = MIN_ENTROPY_TOP_K, MAX_ENTROPY_TOP_K
            _check_integer("rule.fly_entropy_top_k", rule.fly_entropy_top_k, low, high)


@lru_cache(maxsize=1024)
def resolve_rule(rule: Rule, num_speculative_tokens: int) -> Rule:
    """The rule with its preset's values where it has none, for K = `num_speculative_tokens`.

    Parameters that do not apply stay `None`; resolving twice changes nothing.
    """
    validate_rule(rule)
    preset = RULE_PRESETS[rule.name]
    if not preset.fly:
        return rule
    window = rule.fly_window_size if rule.fly_window_size is not None else preset.window_size
    if window is None:
        window = max(0, min(DEFAULT_WINDOW_SIZE, num_speculative_tokens - 1))
    threshold = rule.fly_entropy_threshold
    measure = rule.entropy_measure or preset.entropy_measure
    top_k = None
    if measure is EntropyMeasure.TOP_K:
        top_k = rule.fly_entropy_top_k or DEFAULT_ENTROPY_TOP_K
    return replace(
        rule,
        fly_window_size=window,
        fly_entropy_threshold=preset.entropy_threshold if threshold is None else threshold,
        fly_entropy_top_k=top_k,
        entropy_measure=measure,
    )


_FLY_FIELDS = (
    "fly_window_size",
    "fly_entropy_threshold",
    "fly_entropy_top_k",
    "entropy_measure",
)


def _check_integer(field: str, value: object, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(
            f"{field} must be an integer between {low} and {high}{note}, got {value}"
        )


def _check_threshold(value: float | None, high: float, measure: str) -> None:
    if value is not None and (math.isnan(value) or not 0 <= value <= high):
        raise InvalidArgumentError(
            f"rule.fly_entropy_threshold must be between 0 and {high:g} for the {measure}, "
            f"got {value:g}"
        )
