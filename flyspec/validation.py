"""Ranges of what a request may ask for, and the acceptance rules' presets. No torch here.

The orchestrator checks requests with it and the verify service fills rules in with it. Each message
names the field, what is allowed and what was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams

MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_TOP_LOGPROBS = 20
MAX_WINDOW_SIZE = 1024
MIN_ENTROPY_TOP_K = 2
MAX_ENTROPY_TOP_K = 1024
MAX_ENTROPY_NATS = 20.0
MAX_THRESHOLD_NATS = 100.0
MAX_DIVERGENCE_TOP_K = 1024
MAX_GUARDED_TOKENS = 1024
DEFAULT_ENTROPY_TOP_K = 3
DEFAULT_WINDOW_SIZE = 6
MAX_MIN_TOKENS = 2**32 - 1
MARGIN_WARNING_ABOVE = 0.3
DISTRIBUTION_WARNING_ABOVE_MB = 1.0
BYTES_PER_LOG_PROB = 2


@dataclass(frozen=True, slots=True)
class RulePreset:
    """What a rule's name stands for: the parameters that it has, and their defaults.

    A `fly_window_size` of None is min(6, K - 1), at least 0, for K drafted tokens.
    `lossless`: its output follows the target's distribution.
    """

    defaults: Mapping[str, Any]
    lossless: bool = False


_WITHIN = WindowScope.WITHIN_ROUND
_NO_WINDOW = {"fly_window_size": 0, "window_scope": _WITHIN}
_FLY = {
    "fly_window_size": DEFAULT_WINDOW_SIZE,
    "fly_entropy_threshold": 0.3,
    "entropy_measure": EntropyMeasure.TOP_K,
    "fly_entropy_top_k": DEFAULT_ENTROPY_TOP_K,
}

RULE_PRESETS: Mapping[str, RulePreset] = MappingProxyType(
    {
        "exact": RulePreset({}, lossless=True),
        "fly": RulePreset({**_FLY, "fly_window_size": None, "window_scope": _WITHIN}),
        "fly-paper": RulePreset(
            {**_FLY, "entropy_measure": EntropyMeasure.NORMALIZED, "window_scope": _WITHIN}
        ),
        "fly-reference": RulePreset(_FLY),
        "margin": RulePreset(
            {
                "margin_threshold": 0.3,
                "fly_window_size": DEFAULT_WINDOW_SIZE,
                "window_scope": WindowScope.ACROSS_ROUNDS,
            }
        ),
        "fuzzy": RulePreset(
            {
                "divergence": Divergence.JS,
                "divergence_threshold": 0.1,
                "divergence_top_k": 50,
                **_NO_WINDOW,
            }
        ),
        "fuzzy-reference": RulePreset({"divergence": Divergence.JS, "divergence_threshold": 0.3}),
        "rejection": RulePreset({"divergence_top_k": 0}, lossless=True),
        "typical": RulePreset({"typical_epsilon": 0.09, "typical_delta": 0.3, **_NO_WINDOW}),
        "random": RulePreset({"random_acceptance": 0.1, **_NO_WINDOW}),
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
    _check_positive("sampling.top_p", sampling.top_p, 1.0)
    _check_integer("sampling.top_k", sampling.top_k, 0, MAX_TOP_K, " (0 keeps every token)")
    _check_number("sampling.min_p", sampling.min_p, 0.0, 1.0)
    penalty = sampling.repetition_penalty
    _check_positive("sampling.repetition_penalty", penalty, MAX_REPETITION_PENALTY)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _check_number(f"sampling.{name}", value, -MAX_PENALTY, MAX_PENALTY)
    _check_integer("sampling.min_tokens", sampling.min_tokens, 0, MAX_MIN_TOKENS)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS_TOKENS:
        raise InvalidArgumentError(
            f"sampling.logit_bias: at most {MAX_LOGIT_BIAS_TOKENS} tokens, "
            f"got {len(sampling.logit_bias)}"
        )
    for token_id, bias in sampling.logit_bias:
        _check_number(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def validate_rule(rule: Rule, field: str = "rule") -> None:
    """Refuse an unknown rule, a parameter that does not apply to it, or one out of range.

    `field` is how messages call the rule.
    """
    preset = RULE_PRESETS.get(rule.name)
    if preset is None:
        raise InvalidArgumentError(
            f"{field}.name must be one of {', '.join(RULE_PRESETS)}, got {rule.name!r}"
        )
    for name in RULE_PARAMETERS:
        if getattr(rule, name) is not None and name not in preset.defaults:
            raise InvalidArgumentError(f"{field}.{name} does not apply to the rule {rule.name!r}")
    if rule.guarded_token_ids and preset.lossless:
        raise InvalidArgumentError(
            f"{field}.guarded_token_ids does not apply to the rule {rule.name!r}, "
            "which loses nothing"
        )
    if len(rule.guarded_token_ids) > MAX_GUARDED_TOKENS:
        raise InvalidArgumentError(
            f"{field}.guarded_token_ids: at most {MAX_GUARDED_TOKENS} tokens, "
            f"got {len(rule.guarded_token_ids)}"
        )
    for name, low, high in _INTEGER_RANGES:
        if (value := getattr(rule, name)) is not None:
            _check_integer(f"{field}.{name}", value, low, high)
    for name, most in _NUMBER_RANGES:
        if (value := getattr(rule, name)) is not None:
            _check_number(f"{field}.{name}", value, 0.0, most)
    if "fly_entropy_threshold" in preset.defaults:
        _validate_entropy(rule, rule.entropy_measure or preset.defaults["entropy_measure"], field)
    if rule.name == "fuzzy-reference" and rule.divergence is Divergence.TV:
        raise InvalidArgumentError(
            f"{field}.divergence must be js or kl for the rule 'fuzzy-reference', got tv"
        )


def _validate_entropy(rule: Rule, measure: EntropyMeasure, field: str) -> None:
    name, value = f"{field}.fly_entropy_threshold", rule.fly_entropy_threshold
    if measure is EntropyMeasure.NORMALIZED:
        if value is not None:
            _check_number(name, value, 0.0, 1.0, " for the normalized measure")
        if rule.fly_entropy_top_k is not None:
            raise InvalidArgumentError(
                f"{field}.fly_entropy_top_k does not apply to the normalized measure"
            )
    elif value is not None:
        _check_number(name, value, 0.0, MAX_ENTROPY_NATS, " for the top_k measure, in nats")


def resolve_rule(rule: Rule, num_speculative_tokens: int) -> Rule:
    """The rule with its preset's values where it has none, for K = `num_speculative_tokens`.

    Parameters that do not apply stay `None`; resolving twice changes nothing. Raises
    `InvalidArgumentError` for a rule that does not validate.
    """
    # Not behind the cache: it would take a window of True for one of 1, which is equal to it.
    validate_rule(rule)
    return _with_defaults(rule, num_speculative_tokens)


@lru_cache(maxsize=1024)
def _with_defaults(rule: Rule, num_speculative_tokens: int) -> Rule:
    missing = {
        name: default
        for name, default in RULE_PRESETS[rule.name].defaults.items()
        if getattr(rule, name) is None
    }
    if "fly_window_size" in missing and missing["fly_window_size"] is None:
        missing["fly_window_size"] = max(0, min(DEFAULT_WINDOW_SIZE, num_speculative_tokens - 1))
    if rule.entropy_measure is EntropyMeasure.NORMALIZED or (
        missing.get("entropy_measure") is EntropyMeasure.NORMALIZED
    ):
        missing.pop("fly_entropy_top_k", None)
    return replace(rule, **missing)


def distribution_spec(rule: Rule, sampling: SamplingParams) -> DistributionSpec | None:
    """Which of the draft's distributions a resolved rule needs; None if it needs none."""
    if rule.name == "rejection":
        # Greedy: both distributions are one token, and the drafts tell which.
        return None if sampling.greedy else DistributionSpec(rule.divergence_top_k or 0, True)
    if rule.name in ("fuzzy", "fuzzy-reference"):
        return DistributionSpec(rule.divergence_top_k or 0, raw=rule.name == "fuzzy-reference")
    return None


def rule_warnings(rule: Rule, num_speculative_tokens: int) -> list[str]:
    """What the caller should know about a resolved rule's parameters, for this K."""
    warnings = []
    tau = rule.margin_threshold
    if tau is not None and tau > MARGIN_WARNING_ABOVE:
        warnings.append(
            f"rule.margin_threshold {tau:g} is above {MARGIN_WARNING_ABOVE:g}: texts may begin to "
            "loop (at 0.4, 0.44 % of texts did in llama.cpp's measurements)"
        )
    window = rule.fly_window_size or 0
    if rule.name == "fly-reference":  # its window counts the mismatch itself
        closes = window <= num_speculative_tokens
    else:
        closes = window < num_speculative_tokens or rule.window_scope is not _WITHIN
    if num_speculative_tokens and not closes:
        warnings.append(
            f"rule.fly_window_size {window} does not fit in a round of num_speculative_tokens "
            f"{num_speculative_tokens}: no window can close, so nothing is accepted loosely; lower "
            "the one or raise the other"
        )
    theta = rule.fly_entropy_threshold
    if theta is not None and rule.entropy_measure is EntropyMeasure.TOP_K:
        top_k = rule.fly_entropy_top_k or DEFAULT_ENTROPY_TOP_K
        # -p log p is largest at p = 1/e; from k = 3 on, k tokens cannot all have that much.
        most = 2 / math.e if top_k == 2 else math.log(top_k)
        if theta > most:
            warnings.append(
                f"rule.fly_entropy_threshold {theta:g} is above {most:.3g} nats, the most that the "
                f"top_k entropy with k = {top_k} can be: nothing is accepted loosely"
            )
    if rule.name == "fuzzy" and rule.divergence in _LARGEST_DIVERGENCE:
        largest, threshold = _LARGEST_DIVERGENCE[rule.divergence], rule.divergence_threshold
        if threshold is not None and threshold > largest:
            warnings.append(
                f"rule.divergence_threshold {threshold:g} is above {largest:.3g}, the most that "
                f"{rule.divergence.name.lower()} can be: every mismatch passes it"
            )
    return warnings


def distribution_warnings(
    rule: Rule, spec: DistributionSpec | None, num_speculative_tokens: int, vocab_size: int
) -> list[str]:
    """What draft distributions of the whole vocabulary cost on the wire, if it is much."""
    if spec is None or spec.top_k:
        return []
    megabytes = num_speculative_tokens * vocab_size * BYTES_PER_LOG_PROB / 1e6
    if megabytes <= DISTRIBUTION_WARNING_ABOVE_MB:
        return []
    instead = (
        "; set rule.divergence_top_k to send the most likely tokens alone"
        if "divergence_top_k" in RULE_PRESETS[rule.name].defaults
        else ""
    )
    return [
        f"rule {rule.name!r} sends the draft's distributions over the whole vocabulary: up to "
        f"{megabytes:.1f} MB a round to the target{instead}"
    ]


RULE_PARAMETERS = tuple(f.name for f in fields(Rule) if f.name not in ("name", "guarded_token_ids"))
"""Names of the parameters that a rule may have, besides the tokens that it guards."""

_LARGEST_DIVERGENCE = {Divergence.JS: math.log(2.0), Divergence.TV: 1.0}
_INTEGER_RANGES = (
    ("fly_window_size", 0, MAX_WINDOW_SIZE),
    ("fly_entropy_top_k", MIN_ENTROPY_TOP_K, MAX_ENTROPY_TOP_K),
    ("divergence_top_k", 0, MAX_DIVERGENCE_TOP_K),
)
_NUMBER_RANGES = (
    ("margin_threshold", MAX_THRESHOLD_NATS),
    ("divergence_threshold", MAX_THRESHOLD_NATS),
    ("typical_epsilon", 1.0),
    ("typical_delta", MAX_THRESHOLD_NATS),
    ("random_acceptance", 1.0),
)


def _check_integer(field: str, value: object, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(
            f"{field} must be an integer between {low} and {high}{note}, got {value}"
        )


def _check_number(field: str, value: float, low: float, high: float, note: str = "") -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgumentError(
            f"{field} must be between {low:g} and {high:g}{note}, got {value:g}"
        )


def _check_positive(field: str, value: float, high: float) -> None:
    if not 0 < value <= high:
        raise InvalidArgumentError(
            f"{field} must be greater than 0 and at most {high:g}, got {value:g}"
        )
