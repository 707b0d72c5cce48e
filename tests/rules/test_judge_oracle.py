"""`judge` and rounds judged together, compared with the restatement on random cases."""

import math
import random
from dataclasses import replace

import pytest
import torch

from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.values.rounds import Budget, OpenWindow, Outcome, RuleSegment, Verdict
from flyspec.values.tokens import SamplingParams
from tests.rules.restatement import restate_segments
from tests.rules.rule_cases import (
    arguments,
    cases,
    differences,
    draw_parameters,
    draw_threshold,
    first_cases,
)
from verify_service.rules import batch_pass, decide_all, deciding, judge, prepare

SCOPES = {
    "exact": [None],
    "fly": ["within", "across"],
    "fly-paper": ["within", "across"],
    "fly-reference": [None],
    "margin": ["within", "across"],
    "fuzzy": ["within", "across"],
    "fuzzy-reference": [None],
    "kl": ["within", "across"],
    "rejection": [None],
    "ensemble": [None],
    "cactus": [None],
    "relaxed": ["within", "across"],
    "mars": ["within", "across"],
    "typical": ["within", "across"],
    "random": ["within", "across"],
    "autojudge": ["within", "across"],
}
LOOSENED = ("ensemble", "cactus")  # speculative sampling
RULES = [(rule, scope) for rule, scopes in SCOPES.items() for scope in scopes]
SHORT = 150


@pytest.mark.parametrize("count", [SHORT, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.parametrize(("rule", "scope"), RULES)
def test_judge_agrees_with_the_restatement(rule, scope, count):
    drawn = first_cases(rule, count, scope) if count == SHORT else cases(rule, count, scope)
    num_loose = 0
    for case, expected in drawn:
        assert not differences(case, expected, judge(**arguments(case))), case
        num_loose += bool({"LOOSE", "PROVISIONAL"} & {*expected.outcomes})
    if rule not in ("exact", "rejection"):
        assert num_loose >= count / (30 if rule in LOOSENED else 10)


def off_the_last_bit(rule, count=SHORT):
    """Without cases whose threshold equals a sum: other shapes and devices add in other orders."""
    exact = rule in ("margin", "random")
    drawn = [case for scope in SCOPES[rule] for case in first_cases(rule, SHORT, scope)[:count]]
    return [each for each in drawn if exact or not each[0].equal_at]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", SCOPES)
def test_cuda_judges_as_the_cpu(rule):
    for case, expected in off_the_last_bit(rule):
        draft = case.draft
        if draft is not None:
            ids = draft.token_ids
            draft = Distributions(draft.log_probs.cuda(), None if ids is None else ids.cuda())
        changed = {
            "target_logits": case.logits.cuda(),
            "draft_distributions": draft,
            "hidden_rows": None if case.hidden is None else case.hidden.cuda(),
            "autojudge": case.judge and case.judge.on("cuda"),
        }
        assert not differences(case, expected, judge(**(arguments(case) | changed)))


EACH = 20
"""Cases of each rule."""


@pytest.fixture
def reads(monkeypatch):
    """The number of values that each read returned."""
    counts = []
    original = batch_pass.read

    def read(tables):
        numbers = original(tables)
        counts.append(len(numbers))
        return numbers

    monkeypatch.setattr(batch_pass, "read", read)
    return counts


@pytest.mark.parametrize("most", [1, 1 << 24], ids=["one each", "all"])
def test_mixed_rounds_are_judged_as_the_restatement_says(most, reads, monkeypatch):
    monkeypatch.setattr(deciding, "MOST_LOGITS", most)
    drawn = [each for rule in SCOPES for each in off_the_last_bit(rule, EACH)]
    random.Random(1).shuffle(drawn)
    found = decide_all([prepare(**arguments(case)) for case, _ in drawn], at_once=True)
    assert len(reads) == 1
    for (case, expected), verdict in zip(drawn, found, strict=True):
        assert isinstance(verdict, Verdict), verdict
        assert not differences(case, expected, verdict), case.rule


def with_logits(rows, **changes):
    return prepare("exact", [1] * (len(rows) - 1), rows, **changes)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_round_that_cannot_be_judged_fails_alone(at_once):
    rows = torch.zeros(12, 8)
    rows[:, 1] = 1.0
    rows[4, 2] = torch.nan
    biased = SamplingParams(logit_bias=((8, 1.0),))
    history = History([1, 2], 1)
    cases = [
        with_logits(rows[0:3]),
        with_logits(rows[3:6]),  # NaN
        with_logits(rows[6:9], sampling=biased, history=history),
        with_logits(rows[6:9], sampling=SamplingParams(presence_penalty=1.0), history=history),
        with_logits(rows[9:12], sampling=SamplingParams(presence_penalty=1.0)),  # no history
        with_logits(rows[9:12]),
    ]
    found = decide_all(cases, at_once)
    assert found[0] == judge("exact", [1, 1], rows[0:3])
    assert isinstance(found[1], FloatingPointError)
    assert isinstance(found[2], InvalidArgumentError)
    assert isinstance(found[3], Verdict)
    assert isinstance(found[4], ValueError)
    assert found[5] == found[0]


def test_nothing_to_judge_is_not_read(reads):
    assert decide_all([], at_once=True) == []
    assert reads == []


def test_a_cpu_reads_nothing_at_once(reads):
    assert judge("fly", [0, 1], torch.zeros(3, 8)).num_accepted == 1
    assert reads == []


COUNT = 60
SECOND = ("exact", "fly", "fly-reference", "margin", "typical", "relaxed", "random", "mars")
FIRST = [
    ("exact", None), ("fly", "within"), ("fly", "across"), ("fly-reference", None),
    ("margin", "within"), ("margin", "across"), ("relaxed", "within"), ("relaxed", "across"),
    ("fuzzy", "within"), ("rejection", None), ("ensemble", None), ("random", "within"),
]  # fmt: skip


def segmented(rule, scope, count):
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
        segments = []
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
def test_segments_are_judged_as_by_definition(rule, scope):
    num_loose = 0
    found, count = [], 0
    for given, expected, case in segmented(rule, scope, COUNT):
        count += 1
        num_loose += bool({"LOOSE", "PROVISIONAL"} & {*expected.outcomes})
        found += [(case, given, d) for d in differences(case, expected, judge(**given))]
        if not case.equal_at:
            (at_once,) = decide_all([prepare(**given)], at_once=True)
            assert isinstance(at_once, Verdict), at_once
            found += [(case, given, d) for d in differences(case, expected, at_once)]
    assert not found, f"{len(found)}: {found[:2]}"
    assert count > COUNT / 2
    assert num_loose


def rows_for(own, drafts, close=0.1):
    """Logits whose likeliest token is `own`; a draft that differs is close behind it."""
    rows = torch.zeros(len(own), 8)
    for row, token in zip(rows, own, strict=True):
        row[token] = 5.0
    for row, draft, token in zip(rows, drafts, own, strict=False):
        if draft != token:
            row[draft] = 5.0 - close
    return rows


MARGIN = Rule("margin", margin_threshold=1.0, window_scope=WindowScope.WITHIN_ROUND)


def outcomes(verdict):
    return "".join(decision.outcome.name[0] for decision in verdict.decisions)


def test_a_loosened_sample_does_not_pass_in_an_open_window():
    across = replace(MARGIN, fly_window_size=3, window_scope=WindowScope.ACROSS_ROUNDS)
    drafts = [1, 1, 1]
    logits = rows_for([2, 1, 1, 3], drafts, close=-5.0)
    logits[0] = torch.tensor([0.0, -9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    given = {
        "start_position": 5,
        "other_rules": [Rule("ensemble", ensemble_weight=0.0)],
        "rule_segments": [RuleSegment(5, 1)],
        "sampling": SamplingParams(1.0),
        "draft_distributions": Distributions(torch.full((3, 8), -math.log(8.0)), None),
    }
    window = OpenWindow(4, 7, 2, 0.1)
    assert judge(across, drafts, logits, open_window=window, **given).failed
    assert judge(across, drafts, logits, **given).decisions[0].outcome is Outcome.LOOSE


def test_segments_divide_rounds_of_k_without_moving_their_bonus_tokens():
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
def test_segments_are_checked(segments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        judge(
            "exact", [1], rows_for([1, 1], [1]), start_position=5, other_rules=[Rule("fly")],
            rule_segments=segments,
        )  # fmt: skip
