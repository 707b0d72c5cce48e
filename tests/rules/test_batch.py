"""Rounds of all kinds judged together are judged as each is alone, with a single read."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flyspec.engine.model import History
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import Verdict
from flyspec.values.tokens import SamplingParams
from tests.rules.rule_cases import arguments
from tests.rules.rule_comparison import differences, first_cases
from tests.rules.test_judge_oracle import RULES
from verify_service.rules import decide_all, hear, hearings, judge, readings
from verify_service.rules.inquiry import Hearing

EACH = 60
"""Cases of each rule."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each read returned."""
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
    monkeypatch.setattr(hearings, "MOST_LOGITS", most)
    cases = list(itertools.chain(*(first_cases(rule, EACH, scope) for rule, scope in RULES)))
    cases = [each for each in cases if not each[0].equal_at]  # the sum's last bit decides those
    random.Random(1).shuffle(cases)
    found = decide_all([hear(**arguments(case)) for case, _ in cases], at_once=True)
    assert len(reads) == 1
    for (case, expected), verdict in zip(cases, found, strict=True):
        assert isinstance(verdict, Verdict), verdict
        assert not differences(case, expected, verdict), case.rule


def with_logits(rows: torch.Tensor, **changes: object) -> Hearing:
    return hear("exact", [1] * (len(rows) - 1), rows, **changes)  # type: ignore[arg-type]


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
