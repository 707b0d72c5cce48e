"""Rounds that several rules judge, against the restatement and known answers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flyspec.engine.distributions import Distributions
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.values.rounds import Budget, OpenWindow, Outcome, RuleSegment, Verdict
from flyspec.values.tokens import SamplingParams
from tests.rules.restatement import Segment, restate_segments
from tests.rules.rule_case import Case, Expected
from tests.rules.rule_cases import arguments, cases, draw_parameters, draw_threshold
from tests.rules.rule_comparison import differences
from verify_service.rules import decide_all, judge, prepare

COUNT = 300
SECOND = ("exact", "fly", "fly-reference", "margin", "typical", "relaxed", "random", "mars")
FIRST = [
    ("exact", None), ("fly", "within"), ("fly", "across"), ("fly-reference", None),
    ("margin", "within"), ("margin", "across"), ("relaxed", "within"), ("relaxed", "across"),
    ("fuzzy", "within"), ("rejection", None), ("ensemble", None), ("random", "within"),
]  # fmt: skip


def segmented(rule: str, scope: str | None, count: int) -> Iterator[tuple[Any, Expected, Case]]:
    """Cases of a rule, of whose drafts others judge some; the arguments and the verdict."""
    rng = random.Random(f"{rule}/{scope}")
    for case, _ in cases(rule, count, scope, seed=2):
        others = []
        for name in rng.sample(SECOND, rng.randint(1, 2)):
            across = scope == "across" and name not in ("exact", "fly-reference")
            other = replace(case, rule=name, given={}, equal_at=None, guarded=frozenset())
            if name != "exact":
                draw_parameters(other, rng, "across" if across else None, len(case.drafts), True)
                if other.given.get("matches"):
                    other.given["matches"] = False
                if case.drafts:
                    draw_threshold(other, rng, easy=True)
            if not across and name in ("margin",):
                other.given["scope"] = "within"
            others.append(other)
        both = [case, *others]
        positions = range(case.start + 1, case.start + len(case.drafts) + 3)
        starts = sorted(rng.sample(positions, min(len(positions), rng.randint(1, 4))))
        segments: list[Segment] = []
        for start in (case.start - rng.choice([0, 0, 3]), *starts):
            if start < 0:
                start = case.start
            index = rng.randrange(len(both))
            bounds = (None, None)
            if rng.random() < 0.2:
                bounds = rng.choice([(0, None), (1, None), (None, 0.5), (2, 1.5)])
            segments.append((start, index, *bounds))
        expected = restate_segments(both, segments)
        if expected.close:
            continue
        given = arguments(case) | {
            "other_rules": [arguments(other)["rule"] for other in others],
            "rule_segments": [RuleSegment(s, i, Budget(t, c)) for s, i, t, c in segments],
        }
        yield given, expected, case


@pytest.mark.parametrize(("rule", "scope"), FIRST)
def test_segments_are_judged_as_by_definition(rule: str, scope: str | None) -> None:
    tags: Counter[str] = Counter()
    found, count = [], 0
    for given, expected, case in segmented(rule, scope, COUNT):
        count += 1
        tags.update(expected.tags)
        found += [(case, given, d) for d in differences(case, expected, judge(**given))]
        if not case.equal_at:
            (at_once,) = decide_all([prepare(**given)], at_once=True)
            assert isinstance(at_once, Verdict), at_once
            found += [(case, given, d) for d in differences(case, expected, at_once)]
    assert not found, f"{len(found)}: {found[:2]}"
    assert count > COUNT / 2
    assert tags["two rules"] > COUNT / 3
    assert tags["loose"] > COUNT / 12


def rows_for(own: list[int], drafts: list[int], close: float = 0.1) -> torch.Tensor:
    """Logits whose likeliest token is `own`; a draft that differs is close behind it."""
    rows = torch.zeros(len(own), 8)
    for row, token in zip(rows, own, strict=True):
        row[token] = 5.0
    for row, draft, token in zip(rows, drafts, own, strict=False):
        if draft != token:
            row[draft] = 5.0 - close
    return rows


MARGIN = Rule("margin", margin_threshold=1.0, window_scope=WindowScope.WITHIN_ROUND)


def outcomes(verdict: Verdict) -> str:
    return "".join(decision.outcome.name[0] for decision in verdict.decisions)


def test_a_loosened_sample_does_not_pass_in_an_open_window() -> None:
    across = replace(MARGIN, fly_window_size=3, window_scope=WindowScope.ACROSS_ROUNDS)
    drafts = [1, 1, 1]
    logits = rows_for([2, 1, 1, 3], drafts, close=-5.0)
    logits[0] = torch.tensor([0.0, -9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    given: dict[str, Any] = {
        "start_position": 5,
        "other_rules": [Rule("ensemble", ensemble_weight=0.0)],
        "rule_segments": [RuleSegment(5, 1)],
        "sampling": SamplingParams(1.0),
        "draft_distributions": Distributions(torch.full((3, 8), -math.log(8.0)), None),
    }
    window = OpenWindow(4, 7, 2, 0.1)
    assert judge(across, drafts, logits, open_window=window, **given).failed
    assert judge(across, drafts, logits, **given).decisions[0].outcome is Outcome.LOOSE


def test_segments_divide_rounds_of_k_without_moving_their_bonus_tokens() -> None:
    drafts, own = [1] * 6, [2] * 6 + [3]
    loose, rows = replace(MARGIN, fly_window_size=0), rows_for([2] * 6 + [3], [1] * 6)
    segments = [RuleSegment(0, 0), RuleSegment(2, 1)]
    verdict = judge(
        loose, drafts, rows, other_rules=[loose], rule_segments=segments, num_speculative_tokens=3
    )
    assert outcomes(verdict) == "LLLRNN"
    assert own[3] == verdict.next_token_id


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([RuleSegment(6)], r"rule_segments\[0\].start_position must be at most 5"),
        ([RuleSegment(5), RuleSegment(5, 1)], r"\[1\].start_position must be above 5"),
        ([RuleSegment(5, 2)], r"\[0\].rule_index must be between 0 and 1"),
        (
            [RuleSegment(5, 0, Budget(None, float("nan")))],
            r"\[0\].remaining_loose_cost_nats must be at least 0",
        ),
    ],
)
def test_segments_are_checked(segments: list[RuleSegment], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge(
            "exact", [1], rows_for([1, 1], [1]), start_position=5, other_rules=[Rule("fly")],
            rule_segments=segments,
        )  # fmt: skip
