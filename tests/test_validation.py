"""Ranges and presets: what is refused, in which words, and what fills in."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from flyspec.errors import InvalidArgumentError
from flyspec.types import EntropyMeasure, Rule, SamplingParams
from flyspec.validation import RULE_PRESETS, resolve_rule, validate_rule, validate_sampling

NORMALIZED, TOP_K = EntropyMeasure.NORMALIZED, EntropyMeasure.TOP_K


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.001, "top_p": 1e-6, "top_k": 1}],
)
def test_sampling_in_range(fields: dict[str, Any]) -> None:
    validate_sampling(SamplingParams(**fields))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy) or between 0.001 and 100"),
        ("temperature", 1e-6, "0 (greedy) or between 0.001 and 100"),
        ("temperature", math.inf, "0 (greedy) or between 0.001 and 100"),
        ("temperature", math.nan, "0 (greedy) or between 0.001 and 100"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.01, "greater than 0 and at most 1"),
        ("top_p", math.nan, "greater than 0 and at most 1"),
        ("top_k", -1, "an integer between 0 and 2147483647"),
        ("top_k", 2.0, "an integer between 0 and 2147483647"),
    ],
)
def test_sampling_out_of_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate_sampling(SamplingParams(**{field: value}))
    assert f"sampling.{field} must be {allowed}" in str(caught.value)
    assert f"got {value:g}" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("fuzy"), "rule.name must be one of exact, fly, fly-paper, fly-reference, got 'fuzy'"),
        (Rule("exact", fly_window_size=0), "rule.fly_window_size does not apply to the rule"),
        (Rule("exact", entropy_measure=TOP_K), "rule.entropy_measure does not apply to the rule"),
        (Rule("fly", -1), "rule.fly_window_size must be an integer between 0 and 1024, got -1"),
        (Rule("fly", 1025), "rule.fly_window_size must be an integer between 0 and 1024"),
        (Rule("fly", True), "rule.fly_window_size must be an integer between 0 and 1024"),
        (
            Rule("fly-paper", None, 1.5),
            "rule.fly_entropy_threshold must be between 0 and 1 for the normalized measure, "
            "got 1.5",
        ),
        (Rule("fly", None, 20.5), "must be between 0 and 20 for the top_k measure, in nats"),
        (Rule("fly", None, -0.1), "rule.fly_entropy_threshold must be between 0 and 20"),
        (Rule("fly", None, math.nan), "rule.fly_entropy_threshold must be between 0 and 20"),
        (Rule("fly", None, math.inf), "rule.fly_entropy_threshold must be between 0 and 20"),
        (Rule("fly", None, 1.5, None, NORMALIZED), "between 0 and 1 for the normalized measure"),
        (
            Rule("fly", None, None, 1),
            "rule.fly_entropy_top_k must be an integer between 2 and 1024",
        ),
        (Rule("fly", None, None, 1025), "must be an integer between 2 and 1024, got 1025"),
        (Rule("fly-paper", None, None, 3), "does not apply to the normalized measure"),
    ],
)
def test_rules_refused(rule: Rule, message: str) -> None:
    for check in (validate_rule, lambda r: resolve_rule(r, 15)):
        with pytest.raises(InvalidArgumentError) as caught:
            check(rule)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "k", "resolved"),
    [
        (Rule("exact"), 15, Rule("exact")),
        (Rule("fly"), 15, Rule("fly", 6, 0.3, 3, TOP_K)),
        (Rule("fly"), 7, Rule("fly", 6, 0.3, 3, TOP_K)),
        (Rule("fly"), 4, Rule("fly", 3, 0.3, 3, TOP_K)),
        (Rule("fly"), 1, Rule("fly", 0, 0.3, 3, TOP_K)),
        (Rule("fly"), 0, Rule("fly", 0, 0.3, 3, TOP_K)),
        (Rule("fly", 9, 0.0, 5), 4, Rule("fly", 9, 0.0, 5, TOP_K)),
        (Rule("fly", 0), 4, Rule("fly", 0, 0.3, 3, TOP_K)),
        (Rule("fly-paper"), 4, Rule("fly-paper", 6, 0.3, None, NORMALIZED)),
        (
            Rule("fly-paper", entropy_measure=TOP_K),
            4,
            Rule("fly-paper", 6, 0.3, 3, TOP_K),
        ),
        (Rule("fly-reference"), 4, Rule("fly-reference", 6, 0.3, 3, TOP_K)),
    ],
)
def test_presets_fill_in(rule: Rule, k: int, resolved: Rule) -> None:
    assert resolve_rule(rule, k) == resolved
    assert resolve_rule(resolved, k) == resolved


def test_presets_are_valid() -> None:
    for name in RULE_PRESETS:
        validate_rule(resolve_rule(Rule(name), 15))


def test_validation_needs_no_torch() -> None:
    code = "import sys, flyspec.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
