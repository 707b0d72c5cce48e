"""`judge` on single rounds: its verdicts, what it reads, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import OpenWindow, Outcome, Verdict
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from verify_service.rules import judge
from verify_service.rules.criteria.entropy import Entropy
from verify_service.rules.criteria.typical import Typical

ACROSS = WindowScope.ACROSS_ROUNDS
EXACT, LOOSE, PROVISIONAL = Outcome.EXACT, Outcome.LOOSE, Outcome.PROVISIONAL
REJECTED, NOT_REACHED = Outcome.REJECTED, Outcome.NOT_REACHED


def outcomes(verdict: Verdict) -> list[Outcome]:
    return [decision.outcome for decision in verdict.decisions]


def wanting(tokens: list[int], gap: float = 0.1, vocab: int = 8) -> Tensor:
    """Logits whose most likely tokens are these, by `gap` before all others."""
    rows = torch.zeros(len(tokens), vocab, dtype=torch.float64)
    rows[range(len(tokens)), tokens] = gap
    return rows


def point_masses(tokens: list[int], vocab: int = 8) -> Distributions:
    rows = torch.full((len(tokens), vocab), -torch.inf)
    rows[range(len(tokens)), tokens] = 0.0
    return Distributions(rows, None)


def test_exact_measures_no_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(Entropy, "measure", refuse)
    verdict = judge("exact", [0, 0, 3, 0], torch.zeros(5, 8))
    assert verdict.num_accepted == 2
    assert verdict.decisions[2].gap_nats == 0.0
    assert [d.entropy for d in verdict.decisions] == [None] * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_looks_no_further_than_it_must(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row on a CPU, all rows at once on a GPU, the one after the drafts included."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    measured, original = [], Typical.measure

    def measure(self: Typical, at: Any) -> Tensor:
        measured.append(at.raw.shape[0])
        return original(self, at)

    monkeypatch.setattr(Typical, "measure", measure)
    logits = wanting([1, 2, 3, 4, 5, 6], gap=9.0).to(device)
    verdict = judge("typical", [1, 2, 0, 0, 0], logits)
    assert outcomes(verdict) == [EXACT, EXACT, REJECTED, NOT_REACHED, NOT_REACHED]
    assert measured == ([1] if device == "cpu" else [6])


def test_no_drafts_is_plain_decoding() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for rule in ("exact", "fly", "margin", "fuzzy", "rejection"):
        assert judge(rule, [], logits, start_position=7) == Verdict(7, 1, start_length=7)
    hot = judge("rejection", [], logits, sampling=SamplingParams(1.0), start_position=7)
    assert (hot.num_accepted, hot.keep_length) == (0, 7)


@pytest.mark.parametrize("rule", ["fly", "margin", "typical", "random"])
def test_impossible_tokens_cost_infinitely_and_never_stand(rule: str) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 3] = -math.inf
    verdict = judge(rule, [3], logits)
    assert verdict.num_accepted == 0
    assert verdict.decisions[0].gap_nats == math.inf
    truncated = judge(
        Rule("random", random_acceptance=1.0, fly_window_size=0),
        [3],
        torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 2),
        sampling=SamplingParams(1.0, top_k=1),
    )
    assert outcomes(truncated) == [REJECTED]


@pytest.mark.parametrize(
    ("drafts", "rows", "message"),
    [([1], 3, "must have 2 rows"), ([9], 2, "between 0 and 3"), ([-1], 2, "between 0 and 3")],
)
def test_arguments_that_cannot_be_judged(drafts: list[int], rows: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge("exact", drafts, torch.zeros(rows, 4))


@pytest.mark.parametrize(
    ("rule", "draft", "message"),
    [
        (Rule("fuzzy"), None, "distributions: .*'fuzzy' needs .* send 2"),
        (Rule("fuzzy-reference"), None, "'fuzzy-reference' needs"),
        (Rule("rejection"), None, "'rejection' needs"),
        (Rule("fuzzy"), Distributions(torch.zeros(1, 8), None), "2, one per drafted token, got 1"),
        (Rule("fuzzy"), Distributions(torch.zeros(2, 7), None), "need 8 log-prob.*; got 7"),
        (
            Rule("fuzzy", divergence_top_k=0),
            Distributions(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)),
            "compares whole distributions.* list of up to 3",
        ),
    ],
)
def test_distributions_that_are_needed(
    rule: Rule, draft: Distributions | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge(
            rule, [1, 2], torch.zeros(3, 8), sampling=SamplingParams(1.0),
            draft_distributions=draft,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "window", "message"),
    [
        ("fly", OpenWindow(3, 0, 1, 0.0), "'fly' end with their round"),
        ("margin", OpenWindow(9, 0, 1, 0.0), "position must be between 0 and 8.*got 9"),
        ("margin", OpenWindow(3, 0, 0, 0.0), "remaining_matches must be at least 1, got 0"),
    ],
)
def test_windows_that_cannot_be_open(rule: str, window: OpenWindow, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        judge(rule, [1], torch.zeros(2, 8), start_position=9, open_window=window)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8)], ids=["greedy", "1"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("name", RULE_PRESETS)
def test_logits_that_are_not_finite_are_refused(
    name: str, row: int, value: float, sampling: SamplingParams
) -> None:
    drafts = [0, 1, 2]
    logits = wanting([0, 1, 2, 3], gap=30.0)
    given = {"sampling": sampling, "draft_distributions": point_masses(drafts)}
    given |= {"hidden_rows": torch.zeros(4, 3), "autojudge": random_judge(3)}
    judge(name, drafts, logits, **given)
    logits[row, 5] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        judge(name, drafts, logits, **given)
