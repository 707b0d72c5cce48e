"""`judge` and rounds judged together, compared with the restatement on random cases."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import Verdict
from flyspec.values.tokens import SamplingParams
from tests.rules.rule_case import Case, Expected
from tests.rules.rule_cases import arguments
from tests.rules.rule_comparison import differences, first_cases, run
from verify_service.rules import decide_all, deciding, judge, prepare, readings
from verify_service.rules.inquiry import PendingVerdict

SCOPES: dict[str, list[str | None]] = {
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
SHORT = 1500
ANY_RULE = ["K=1", "tie", "-inf", "before EOS"]
LOSSY = [*ANY_RULE, "threshold=measure", "W=0", "control", "guarded", "impossible"]
LOSSY += ["budget of one", "too dear"]
WINDOW = ["W>=K", "closes on the last draft", "fails on the first draft", "EOS in a window"]
WITHIN = ["j+W=K", "j+W=K+1"]
ACROSS = ["provisional", "came open", "K=0 with an open window", "EOS fails a window"]


def boundaries(rule: str, scope: str | None) -> list[str]:
    if rule == "exact":
        return ANY_RULE
    if rule == "rejection":
        return [*ANY_RULE, "residual"]
    if rule in LOOSENED:
        return [*ANY_RULE, "residual", "control", "guarded", "budget of one", "too dear"]
    if rule == "fuzzy-reference":
        return [*LOSSY, "rejected match"]
    if (rule, scope) == ("random", "within"):
        return [*LOSSY, *WINDOW, *WITHIN, "rejected match"]
    return [*LOSSY, *WINDOW, *(ACROSS if scope == "across" else WITHIN)]


def check(rule: str, scope: str | None, count: int, at_least: int) -> None:
    tags, found = run(rule, count, scope)
    print(rule, scope, count, dict(tags))
    assert not found, f"{len(found)} of {count}: {found[:3]}"
    for tag in boundaries(rule, scope):
        assert tags[tag] >= at_least, f"{tag} occurred {tags[tag]} times"
    if rule not in ("exact", "rejection"):
        # random, which also rejects matches, has 19 %
        assert tags["loose"] >= count / (15 if rule in LOOSENED else 6)


@pytest.mark.parametrize(("rule", "scope"), RULES)
def test_judge_agrees_with_the_restatement(rule: str, scope: str | None) -> None:
    check(rule, scope, SHORT, at_least=3)


@pytest.mark.full
@pytest.mark.parametrize(("rule", "scope"), RULES)
def test_judge_agrees_with_the_restatement_on_20000_cases(rule: str, scope: str | None) -> None:
    check(rule, scope, 20_000, at_least=80)


def off_the_last_bit(rule: str) -> list[tuple[Case, Expected]]:
    """Without cases whose threshold equals a sum: other shapes and devices add in other orders."""
    exact = rule in ("margin", "random")
    return [
        c for s in SCOPES[rule] for c in first_cases(rule, SHORT, s) if exact or not c[0].equal_at
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", SCOPES)
def test_cuda_judges_as_the_cpu(rule: str) -> None:
    for case, expected in off_the_last_bit(rule):
        draft = case.draft
        if draft is not None:
            ids = draft.token_ids
            draft = Distributions(draft.log_probs.cuda(), None if ids is None else ids.cuda())
        changed: dict[str, Any] = {
            "target_logits": case.logits.cuda(),
            "draft_distributions": draft,
            "hidden_rows": None if case.hidden is None else case.hidden.cuda(),
            "autojudge": case.judge and case.judge.on("cuda"),
        }
        assert not differences(case, expected, judge(**(arguments(case) | changed)))


EACH = 60
"""Cases of each rule."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values that each read returned."""
    counts: list[int] = []
    original = readings.read

    def read(tables: list[torch.Tensor]) -> list[float]:
        numbers = original(tables)
        counts.append(len(numbers))
        return numbers

    monkeypatch.setattr(readings, "read", read)
    return counts


@pytest.mark.parametrize("most", [1, 2000, 1 << 24], ids=["one each", "several", "all"])
def test_mixed_rounds_are_judged_as_the_restatement_says(
    most: int, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "MOST_LOGITS", most)
    cases = list(itertools.chain(*(first_cases(rule, EACH, scope) for rule, scope in RULES)))
    cases = [each for each in cases if not each[0].equal_at]  # the sum's last bit decides those
    random.Random(1).shuffle(cases)
    found = decide_all([prepare(**arguments(case)) for case, _ in cases], at_once=True)
    assert len(reads) == 1
    for (case, expected), verdict in zip(cases, found, strict=True):
        assert isinstance(verdict, Verdict), verdict
        assert not differences(case, expected, verdict), case.rule


def with_logits(rows: torch.Tensor, **changes: object) -> PendingVerdict:
    return prepare("exact", [1] * (len(rows) - 1), rows, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_round_that_cannot_be_judged_fails_alone(at_once: bool) -> None:
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


def test_nothing_to_judge_is_not_read(reads: list[int]) -> None:
    assert decide_all([], at_once=True) == []
    assert reads == []


def test_a_cpu_reads_nothing_at_once(reads: list[int]) -> None:
    assert judge("fly", [0, 1], torch.zeros(3, 8)).num_accepted == 1
    assert reads == []
