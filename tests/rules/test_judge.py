"""`judge` on single rounds: what it reads and refuses, criteria at their edges, limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.sampling import choose
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import OpenWindow, Outcome, Verdict
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from verify_service.rules import judge
from verify_service.rules.criteria.draft import (
    comparable,
    jensen_shannon,
    kl,
    reversed_jensen_shannon,
    total_variation,
)
from verify_service.rules.criteria.target import Entropy, Typical
from verify_service.rules.speculative_sampling import residual_log_weights

EXACT = Outcome.EXACT
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


def test_an_empty_residual_is_drawn_from_the_target() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    q = Distributions(torch.softmax(logits, -1).log() + 0.01, None)  # p < q everywhere
    expected = torch.softmax(logits, -1).log()
    torch.testing.assert_close(residual_log_weights(torch.softmax(logits, -1), q), expected)


def test_point_masses_are_infinitely_far_by_kl_and_not_by_js() -> None:
    logits = torch.zeros(1, 8)
    p, q = comparable(logits, point_masses([2]), 0)
    one = Distributions(torch.zeros(1, 1), torch.tensor([[2]]))
    listed = comparable(logits, one, 0)
    assert kl(p, q).item() == kl(*listed).item() == math.inf
    for formula in (jensen_shannon, total_variation):  # a list of one token is all there is to it
        torch.testing.assert_close(formula(p, q), formula(*listed))
    assert jensen_shannon(p, q).item() < math.log(2)
    assert reversed_jensen_shannon(p, q).item() == math.inf


def test_half_floats_that_add_up_to_one_rule_nothing_out() -> None:
    """q has 1e-5 outside its list, which rounding hides: KL must stay finite."""
    logits = torch.tensor([[8.0, 7.0, *[-4.0] * 30]])
    q = logits.log_softmax(-1)[:, :2].half().float()
    q[0, 0] += 1.0 - q.exp().sum()
    draft = Distributions(q, torch.tensor([[0, 1]]))
    assert abs(kl(*comparable(logits, draft, 2)).item()) < 1e-3


def closed_rules() -> list[Rule]:
    """The parameters that give `exact`, whatever the window."""
    normalized = EntropyMeasure.NORMALIZED
    rules = [
        Rule(name, 0, 1.0, None, normalized, scope)
        for name in ("fly", "fly-paper")
        for scope in WindowScope
    ]
    rules.append(Rule("fly-reference", 0, 1.0, None, normalized))
    for scope in WindowScope:
        shared = {"fly_window_size": 0, "window_scope": scope}
        rules.append(Rule("margin", margin_threshold=0.0, **shared))
        rules.append(Rule("random", random_acceptance=0.0, **shared))
        rules.append(Rule("kl", divergence_threshold=0.0, **shared))
        rules.append(Rule("mars", mars_ratio=1.0, **shared))
        rules += [
            Rule("fuzzy", divergence=kind, divergence_threshold=0.0, divergence_top_k=k, **shared)
            for kind in Divergence
            for k in (0, 4)
        ]
    return rules


WIDE = [  # within a round, W >= K
    Rule("fly", 8, 0.0),
    Rule("fly-paper", 9, 0.0),
    Rule("fly-reference", 8, 0.0),
    Rule("margin", 8, margin_threshold=50.0, window_scope=WindowScope.WITHIN_ROUND),
    Rule("fuzzy", 8, divergence_threshold=50.0),
    Rule("typical", 8, typical_epsilon=0.0),
    Rule("kl", 8, divergence_threshold=50.0, confidence_threshold=1.0),
    Rule("relaxed", 8, relaxed_ratio=0.0),
    Rule("mars", 8, mars_ratio=0.0),
    Rule("random", 8, random_acceptance=1.0),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [*closed_rules(), *WIDE], ids=str)
def test_limits_give_exact(rule: Rule, temperature: float) -> None:
    """Uniform rows make the entropy 1 and the margin 0 exactly; q = p makes divergences 0."""
    if rule.name == "fly-reference" and temperature > 0:
        pytest.skip("its second sample is a match of its own, whatever the gate")
    generator = torch.Generator().manual_seed(3)
    for seed in range(9):
        logits = torch.randn(9, 16, generator=generator)
        logits[seed % 9] = 0.0
        drafts = torch.randint(0, 16, (8,), generator=generator).tolist()
        for i in range(0, 8, 2):
            drafts[i] = int(choose(logits[i : i + 1], SamplingParams(temperature), i, seed)[0])
        given: dict[str, Any] = {"sampling": SamplingParams(temperature), "seed": seed}
        q = Distributions((logits[:8] / (temperature or 1.0)).log_softmax(-1), None)
        got = judge(rule, drafts, logits, draft_distributions=q, **given)
        assert got == judge("exact", drafts, logits, **given)
