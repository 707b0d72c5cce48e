"""Ranges and presets: what is refused and how, what is filled in, and what causes warnings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flyspec.errors import InvalidArgumentError
from flyspec.rules import PARAMETERS, Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule, rule_warnings, validate_rule
from flyspec.validation import distribution_spec, distribution_warnings, validate_sampling
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.contract.test_rule_table import a_value, owner

NORMALIZED, TOP_K = EntropyMeasure.NORMALIZED, EntropyMeasure.TOP_K
WITHIN, ACROSS = WindowScope.WITHIN_ROUND, WindowScope.ACROSS_ROUNDS
SAMPLED = SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 0.001, "top_p": 1e-6, "top_k": 1},
        {"temperature": 100.0, "min_p": 1.0, "min_tokens": 2**32 - 1},
        {"repetition_penalty": 10.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1e-9},
        {"logit_bias": ((0, -100.0), (7, 100.0))},
        {"logit_bias": tuple((i, 0.0) for i in range(1024))},
    ],
)
def test_sampling_in_range(given: dict[str, Any]) -> None:
    validate_sampling(SamplingParams(**given))


RANGES = {
    "temperature": ("0 (greedy) or between 0.001 and 100", [-0.1, 1e-6, 100.1]),
    "top_p": ("greater than 0 and at most 1", [0.0, 1.01]),
    "top_k": ("an integer between 0 and 2147483647", [-1, 2.0, 2**31]),
    "min_p": ("between 0 and 1", [-0.01, 1.01]),
    "repetition_penalty": ("greater than 0 and at most 10", [0.0, 10.1]),
    "presence_penalty": ("between -2 and 2", [2.1, -2.1]),
    "frequency_penalty": ("between -2 and 2", [2.1, -2.1]),
    "min_tokens": ("an integer between 0 and 4294967295", [-1, 2**32]),
}


@pytest.mark.parametrize("field", RANGES)
def test_sampling_out_of_range(field: str) -> None:
    expected, values = RANGES[field]
    for value in (*values, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidArgumentError) as caught:
            validate_sampling(SamplingParams(**{field: value}))
        assert str(caught.value).startswith(f"sampling.{field} must be {expected}")
        assert str(caught.value).endswith((f"got {value}", f"got {value:g}"))


def test_numbers_of_numpy_are_numbers() -> None:
    """As passed to `Rule` and `judge` in a parameter sweep."""
    third = np.float32(0.3)
    validate_sampling(SamplingParams(top_p=third, min_p=third))
    validate_rule(Rule("fly", fly_entropy_threshold=third))
    with pytest.raises(InvalidArgumentError, match=r"between 0 and 1, got 1\.5"):
        validate_rule(Rule("random", random_acceptance=np.float32(1.5)))


@pytest.mark.parametrize("bias", [100.5, -100.5, math.nan, math.inf, -math.inf])
def test_biases_out_of_range_name_their_token(bias: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate_sampling(SamplingParams(logit_bias=((3, 0.0), (7, bias))))
    assert str(caught.value) == (
        f"sampling.logit_bias[7] must be between -100 and 100, got {bias:g}"
    )


def test_too_many_biases() -> None:
    biases = tuple((i, 0.0) for i in range(1025))
    with pytest.raises(InvalidArgumentError, match="logit_bias: at most 1024 tokens, got 1025"):
        validate_sampling(SamplingParams(logit_bias=biases))


# --- rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule("fuzy"),
            "rule.name must be one of exact, fly, fly-paper, fly-reference, margin, fuzzy, "
            "fuzzy-reference, kl, rejection, ensemble, cactus, typical, relaxed, mars, "
            "autojudge, random, got 'fuzy'",
        ),
        (Rule(""), "rule.name must be one of exact"),
        (Rule("fly", -1), "rule.fly_window_size must be an integer between 0 and 1024, got -1"),
        (Rule("fly", 1025), "rule.fly_window_size must be an integer between 0 and 1024"),
        (Rule("fly", True), "rule.fly_window_size must be an integer between 0 and 1024"),
        (Rule("fly", None, 20.5), "must be between 0 and 20 for the top_k measure, in nats"),
        (Rule("fly", None, -0.1), "rule.fly_entropy_threshold must be between 0 and 20"),
        (Rule("fly", None, 1.5, None, NORMALIZED), "between 0 and 1 for the normalized measure"),
        (Rule("fly", None, None, 1), "rule.fly_entropy_top_k must be an integer between 2 and"),
        (Rule("fly", None, None, 1025), "must be an integer between 2 and 1024, got 1025"),
        (Rule("fly-paper", None, None, 3), "does not apply to the normalized measure"),
        (Rule("margin", margin_threshold=101), "rule.margin_threshold must be between 0 and 100"),
        (Rule("rejection", divergence_top_k=-1), "must be an integer between 0 and 1024, got -1"),
        (Rule("random", random_acceptance=1.1), "rule.random_acceptance must be between 0 and 1"),
        (
            Rule("fly", guarded_token_ids=tuple(range(1025))),
            "rule.guarded_token_ids: at most 1024 tokens, got 1025",
        ),
        *[
            (
                Rule(name, guarded_token_ids=(1,)),
                f"rule.guarded_token_ids does not apply to the rule '{name}', which is lossless",
            )
            for name in ("exact", "rejection")
        ],
    ],
)
def test_rules_refused(rule: Rule, message: str) -> None:
    for check in (validate_rule, lambda r: resolve_rule(r, 15)):
        with pytest.raises(InvalidArgumentError) as caught:
            check(rule)
        assert message in str(caught.value)


def test_an_equal_rule_seen_before_excuses_none() -> None:
    """`True == 1`, so a cache could confuse them."""
    assert resolve_rule(Rule("fly", 1), 15).fly_window_size == 1
    with pytest.raises(InvalidArgumentError, match="fly_window_size must be an integer"):
        resolve_rule(Rule("fly", True), 15)


@pytest.mark.parametrize("name", RULE_PRESETS)
def test_parameters_are_taken_where_they_apply(name: str) -> None:
    for parameter in PARAMETERS.values():
        measure = TOP_K if parameter.name == "fly_entropy_top_k" and name == "fly-paper" else None
        given = {"entropy_measure": measure, parameter.name: a_value(parameter)}
        rule = Rule(name, **given)
        if parameter.name in RULE_PRESETS[name].defaults:
            assert getattr(resolve_rule(rule, 15), parameter.name) == given[parameter.name]
        else:
            with pytest.raises(InvalidArgumentError, match="does not apply to the rule "):
                validate_rule(rule)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float) -> None:
    for parameter in PARAMETERS.values():
        if parameter.ranges:
            rule = Rule(owner(parameter), **{parameter.name: value})
            with pytest.raises(InvalidArgumentError, match=rf"^rule\.{parameter.name} must be "):
                validate_rule(rule)


def test_messages_name_the_rule_as_the_caller_does() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^rules\.mine\.fly_window_size must be"):
        validate_rule(Rule("fly", -1), "rules.mine")
    with pytest.raises(InvalidArgumentError, match=r"^rules\.mine\.fly_entropy_threshold must be"):
        validate_rule(Rule("fly", None, -1.0), "rules.mine")


def fly(name: str, window: int, *more: Any, scope: WindowScope | None = WITHIN) -> Rule:
    return Rule(name, window, *more, window_scope=scope)


@pytest.mark.parametrize(
    ("rule", "k", "resolved"),
    [
        (Rule("exact"), 15, Rule("exact")),
        (Rule("fly"), 15, fly("fly", 6, 0.3, 3, TOP_K)),
        (Rule("fly"), 7, fly("fly", 6, 0.3, 3, TOP_K)),
        (Rule("fly"), 4, fly("fly", 3, 0.3, 3, TOP_K)),
        (Rule("fly"), 2, fly("fly", 1, 0.3, 3, TOP_K)),
        (Rule("fly"), 0, fly("fly", 0, 0.3, 3, TOP_K)),
        (Rule("fly", 9, 0.0, 5), 4, fly("fly", 9, 0.0, 5, TOP_K)),
        (Rule("fly", 0), 4, fly("fly", 0, 0.3, 3, TOP_K)),
        (Rule("fly", window_scope=ACROSS), 15, fly("fly", 6, 0.3, 3, TOP_K, scope=ACROSS)),
        (Rule("fly", entropy_measure=NORMALIZED), 7, fly("fly", 6, 0.3, None, NORMALIZED)),
        (Rule("fly-paper"), 4, fly("fly-paper", 6, 0.3, None, NORMALIZED)),
        (Rule("fly-paper", entropy_measure=TOP_K), 4, fly("fly-paper", 6, 0.3, 3, TOP_K)),
        (Rule("fly-reference"), 4, fly("fly-reference", 6, 0.3, 3, TOP_K, scope=None)),
        (Rule("margin"), 4, Rule("margin", 6, window_scope=ACROSS, margin_threshold=0.3)),
    ],
)
def test_presets_fill_in(rule: Rule, k: int, resolved: Rule) -> None:
    assert resolve_rule(rule, k) == resolved
    assert resolve_rule(resolved, k) == resolved


NO_WINDOW = {"fly_window_size": 0, "window_scope": WITHIN}
JS_OF_50 = {"divergence": Divergence.JS, "divergence_threshold": 0.1, "divergence_top_k": 50}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fuzzy", {**NO_WINDOW, **JS_OF_50}),
        ("rejection", {"divergence_top_k": 0}),
        ("ensemble", {"divergence_top_k": 0, "ensemble_weight": 0.7}),
        ("cactus", {"divergence_top_k": 0, "cactus_delta": 0.2}),
        (
            "relaxed",
            {**NO_WINDOW, "relaxed_top_k": 10, "relaxed_delta": 0.01, "relaxed_ratio": 1.0},
        ),
        ("mars", {**NO_WINDOW, "mars_ratio": 0.9}),
        ("typical", {**NO_WINDOW, "typical_epsilon": 0.09, "typical_delta": 0.3}),
        ("random", {**NO_WINDOW, "random_acceptance": 0.1, "random_judges_matches": False}),
    ],
)
def test_presets_have_these_parameters(name: str, parameters: dict[str, Any]) -> None:
    assert resolve_rule(Rule(name), 4) == Rule(name, **parameters)


def test_what_is_given_stays() -> None:
    guarded = Rule("fuzzy", guarded_token_ids=(5,), divergence=Divergence.KL)
    resolved = resolve_rule(guarded, 4)
    assert (resolved.guarded_token_ids, resolved.divergence) == ((5,), Divergence.KL)
    expected = Rule(
        "fuzzy-reference", divergence=Divergence.KL, divergence_threshold=0.3, divergence_top_k=0
    )
    assert resolve_rule(Rule("fuzzy-reference", divergence=Divergence.KL), 4) == expected


def test_lossless_presets() -> None:
    assert {name for name, p in RULE_PRESETS.items() if p.lossless} == {"exact", "rejection"}


# --- distributions and warnings -------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "sampling", "spec"),
    [
        (Rule("exact"), SAMPLED, None),
        (Rule("fly"), SAMPLED, None),
        (Rule("typical"), SAMPLED, None),
        (Rule("fuzzy"), SamplingParams(), DistributionSpec(50)),
        (Rule("fuzzy", divergence_top_k=0), SAMPLED, DistributionSpec(0)),
        (Rule("fuzzy-reference"), SAMPLED, DistributionSpec(0, raw=True)),
        (Rule("fuzzy-reference", divergence_top_k=50), SAMPLED, DistributionSpec(0, raw=True)),
        (Rule("rejection"), SAMPLED, DistributionSpec(0, draw_from_it=True)),
        (Rule("cactus"), SamplingParams(), None),
        (Rule("cactus"), SAMPLED, DistributionSpec(0, draw_from_it=True)),
        (Rule("ensemble"), SamplingParams(), DistributionSpec(0)),
        (Rule("ensemble"), SAMPLED, DistributionSpec(0, draw_from_it=True)),
        (Rule("rejection", divergence_top_k=8), SAMPLED, DistributionSpec(8, draw_from_it=True)),
        (Rule("rejection"), SamplingParams(), None),
    ],
)
def test_which_distributions_a_rule_needs(
    rule: Rule, sampling: SamplingParams, spec: DistributionSpec | None
) -> None:
    assert distribution_spec(resolve_rule(rule, 15), sampling) == spec


@pytest.mark.parametrize("name", RULE_PRESETS)
def test_presets_warn_of_nothing(name: str) -> None:
    assert rule_warnings(resolve_rule(Rule(name), 15), 15) == []


@pytest.mark.parametrize(
    ("rule", "k", "words"),
    [
        (Rule("margin", margin_threshold=0.3), 4, None),
        (Rule("margin", margin_threshold=0.31), 4, "rule.margin_threshold 0.31 is above 0.3: "),
        (Rule("fly-paper"), 6, "rule.fly_window_size 6 does not fit"),
        (Rule("fly-paper"), 0, None),
        (Rule("fly-paper", window_scope=ACROSS), 4, None),
        (Rule("fly-reference"), 6, "rule.fly_window_size 6 does not fit"),
        (Rule("margin", window_scope=WITHIN), 4, "rule.fly_window_size 6 does not fit"),
        (Rule("fly", 0, math.log(3)), 4, None),
        (Rule("fly", 0, 1.1), 4, "rule.fly_entropy_threshold 1.1 is above 1.1 nats"),
        (Rule("fly", 0, 0.73, 2), 4, None),
        (Rule("fly", 0, 0.74, 2), 4, "above 0.736 nats, the maximum of the top_k entropy with k"),
        (Rule("fuzzy", divergence_threshold=0.69), 4, None),
        (Rule("fuzzy", divergence_threshold=0.7), 4, "is above 0.693, the maximum of js"),
        (Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=1.1), 4, "the maximum of tv"),
        (Rule("fuzzy", divergence=Divergence.KL, divergence_threshold=5.0), 4, None),
        (Rule("fuzzy-reference", divergence_threshold=0.7), 4, None),
    ],
)
def test_warnings(rule: Rule, k: int, words: str | None) -> None:
    warnings = rule_warnings(resolve_rule(rule, k), k)
    assert len(warnings) == (words is not None)
    assert all(str(words) in w for w in warnings)


def test_a_window_of_the_presets_needs_two_drafts() -> None:
    """K = 1 would leave the preset `fly` without a window, unless the request gives one."""
    with pytest.raises(InvalidArgumentError) as caught:
        resolve_rule(Rule("fly"), 1)
    assert str(caught.value).startswith(
        "speculation.num_speculative_tokens must be 0 or at least 2 for the rule 'fly'"
    )
    assert "rule.fly_window_size" in str(caught.value)
    assert resolve_rule(Rule("fly", 0), 1).fly_window_size == 0
    assert resolve_rule(Rule("fly-paper"), 1).fly_window_size == 6
    assert resolve_rule(Rule("fly"), 0).fly_window_size == 0  # plain decoding


def test_without_a_requested_k_the_window_is_that_of_the_default() -> None:
    assert resolve_rule(Rule("fly")).fly_window_size == 6


@pytest.mark.parametrize(("given", "k", "warns"), [
    (Rule("fly"), 2, True), (Rule("fly"), 6, True), (Rule("fly"), 7, False),
    (Rule("fly"), 0, False), (Rule("fly", 1), 2, False), (Rule("typical"), 2, False),
])  # fmt: skip
def test_a_small_k_that_shortens_the_window_is_told(given: Rule, k: int, warns: bool) -> None:
    warnings = rule_warnings(resolve_rule(given, k), k, given)
    assert len(warnings) == warns
    assert all(f"rule.fly_window_size is {k - 1} instead of 6" in w for w in warnings)


@pytest.mark.parametrize(
    ("name", "top_k", "vocab_size", "megabytes"),
    [
        ("fuzzy", 0, 128_256, "3.8 MB per round to the target; set rule.divergence_top_k"),
        ("fuzzy", 50, 128_256, None),
        ("fuzzy", 0, 33_333, None),
        ("fuzzy-reference", 0, 128_256, "3.8 MB per round to the target"),
        ("rejection", 0, 128_256, "3.8 MB per round to the target; set rule.divergence_top_k"),
    ],
)
def test_large_distributions_are_told(
    name: str, top_k: int, vocab_size: int, megabytes: str | None
) -> None:
    warnings = distribution_warnings(Rule(name), DistributionSpec(top_k), 15, vocab_size)
    assert len(warnings) == (megabytes is not None)
    assert all(w.count(str(megabytes)) == 1 for w in warnings)
    assert distribution_warnings(Rule(name), None, 15, vocab_size) == []
