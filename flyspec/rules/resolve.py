"""Validates rules, fills in their defaults and returns warnings about them."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache

from flyspec.errors import InvalidArgumentError
from flyspec.rules import (
    MAX_GUARDED_TOKENS,
    PARAMETERS,
    EntropyMeasure,
    Parameter,
    Rule,
    WindowScope,
    member_name,
)
from flyspec.rules.presets import DEFAULT_WINDOW_SIZE, RULE_PRESETS
from flyspec.speculation_length import REQUESTED_BY_AUTO
from flyspec.spelling import did_you_mean


def validate_rule(rule: Rule, field: str = "rule") -> None:
    """Raise `InvalidArgumentError` for unknown rules and inapplicable or invalid parameters.

    `field` is the rule's name in messages.
    """
    preset = RULE_PRESETS.get(rule.name)
    if preset is None:
        raise InvalidArgumentError(
            f"{field}.name must be one of {', '.join(RULE_PRESETS)}, got {rule.name!r}"
            f"{did_you_mean(rule.name, RULE_PRESETS)}"
        )
    if rule.guarded_token_ids and preset.lossless:
        raise InvalidArgumentError(
            f"{field}.guarded_token_ids does not apply to the rule {rule.name!r}, which is lossless"
        )
    if len(rule.guarded_token_ids) > MAX_GUARDED_TOKENS:
        raise InvalidArgumentError(
            f"{field}.guarded_token_ids: at most {MAX_GUARDED_TOKENS} tokens, "
            f"got {len(rule.guarded_token_ids)}"
        )
    for name, parameter in PARAMETERS.items():
        value = getattr(rule, name)
        if value is None:
            continue
        if name not in preset.defaults:
            raise InvalidArgumentError(f"{field}.{name} does not apply to the rule {rule.name!r}")
        if not parameter.ranges:
            continue
        measure = measure_of(rule, parameter)
        if measure not in parameter.ranges:
            raise InvalidArgumentError(
                f"{field}.{name} does not apply to the {parameter.show(measure)} measure"
            )
        parameter.ranges[measure].check(f"{field}.{name}", value)


def measure_of(rule: Rule, parameter: Parameter) -> IntEnum | None:
    """Return the measure that the rule's value of a parameter is in; None if there is only one."""
    if (by := parameter.measured_by) is None:
        return None
    measure: IntEnum | None = getattr(rule, by) or RULE_PRESETS[rule.name].defaults.get(by)
    return measure


def resolve_rule(rule: Rule, num_speculative_tokens: int = REQUESTED_BY_AUTO) -> Rule:
    """Return the rule with its preset's values where it has none.

    `num_speculative_tokens` is the requested K (default: that of auto), from which a window that
    depends on K is resolved once; shorter rounds keep it. Inapplicable parameters stay `None`;
    resolving twice changes nothing. Raises `InvalidArgumentError` for an invalid rule, or one
    whose window does not fit K = 1.
    """
    # Not cached: a cache would confuse a window of True with the equal 1.
    validate_rule(rule)
    if num_speculative_tokens == 1 and window_depends_on_k(rule):
        raise InvalidArgumentError(
            f"speculation.num_speculative_tokens must be 0 or at least 2 for the rule "
            f"{rule.name!r}, whose window consists of tokens drafted after a mismatch, got 1; "
            "set rule.fly_window_size (0: no window) or use another rule"
        )
    return _with_defaults(rule, num_speculative_tokens)


def window_depends_on_k(rule: Rule) -> bool:
    """True if W is neither given nor fixed by the preset, so that it depends on K."""
    window = RULE_PRESETS[rule.name].defaults.get("fly_window_size", 0)
    return rule.fly_window_size is None and window is None


@lru_cache(maxsize=1024)
def _with_defaults(rule: Rule, num_speculative_tokens: int) -> Rule:
    missing = {
        name: default
        for name, default in RULE_PRESETS[rule.name].defaults.items()
        if getattr(rule, name) is None
        and (
            not (parameter := PARAMETERS[name]).ranges
            or measure_of(rule, parameter) in parameter.ranges
        )
    }
    if window_depends_on_k(rule):
        missing["fly_window_size"] = max(0, min(DEFAULT_WINDOW_SIZE, num_speculative_tokens - 1))
    return replace(rule, **missing)


def rule_warnings(rule: Rule, num_speculative_tokens: int, given: Rule | None = None) -> list[str]:
    """Return warnings about a resolved rule's parameters for this K.

    `given` is the rule before it was resolved; without it, all parameters count as chosen.
    """
    preset = RULE_PRESETS[rule.name]
    warnings = [
        f"rule.{name} {value:g} is above {parameter.unwise_above:g}: {parameter.unwise}"
        for name, parameter in PARAMETERS.items()
        if (value := getattr(rule, name)) is not None and value > parameter.unwise_above
    ]
    window = rule.fly_window_size or 0
    across = rule.window_scope is WindowScope.ACROSS_ROUNDS
    if num_speculative_tokens and window >= num_speculative_tokens and not across:
        warnings.append(
            f"rule.fly_window_size {window} does not fit in a round of num_speculative_tokens "
            f"{num_speculative_tokens}: no window can close, so nothing is accepted loosely; use a "
            "smaller window or more tokens"
        )
    elif (
        num_speculative_tokens
        and window < DEFAULT_WINDOW_SIZE
        and given is not None
        and window_depends_on_k(given)
    ):
        warnings.append(
            f"rule.fly_window_size is {window} instead of {DEFAULT_WINDOW_SIZE}, since "
            f"num_speculative_tokens is {num_speculative_tokens}: fewer tokens must match after a "
            f"loose one; request at least {DEFAULT_WINDOW_SIZE + 1} tokens or set the window"
        )
    theta = rule.fly_entropy_threshold
    if theta is not None and rule.entropy_measure is EntropyMeasure.TOP_K:
        top_k = rule.fly_entropy_top_k
        assert top_k is not None
        # -p log p is largest at p = 1/e; from k = 3 on, k tokens cannot all have that much.
        most = 2 / math.e if top_k == 2 else math.log(top_k)
        if theta > most:
            warnings.append(
                f"rule.fly_entropy_threshold {theta:g} is above {most:.3g} nats, the maximum of "
                f"the top_k entropy with k = {top_k}: nothing is accepted loosely"
            )
    kind, threshold = rule.divergence, rule.divergence_threshold
    if kind is not None and threshold is not None:
        largest = preset.largest.get(kind, math.inf)
        if threshold > largest:
            warnings.append(
                f"rule.divergence_threshold {threshold:g} is above {largest:.3g}, the maximum of "
                f"{member_name(kind)}: every mismatch passes"
            )
    return warnings
