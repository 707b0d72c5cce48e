"""`judge` on single rounds: what it reads and refuses, criteria at their edges, limits."""

import math

import pytest
import torch

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import process_logits
from flyspec.engine.sampling import choose_processed
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import OpenWindow, Outcome
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from verify_service.rules import judge
from verify_service.rules.criteria.target import Typical

EXACT = Outcome.EXACT
REJECTED, NOT_REACHED = Outcome.REJECTED, Outcome.NOT_REACHED


def outcomes(verdict):
    return [decision.outcome for decision in verdict.decisions]


def wanting(tokens, gap=0.1, vocab=8):
    """Logits whose most likely tokens are these, by `gap` before all others."""
    rows = torch.zeros(len(tokens), vocab, dtype=torch.float64)
    rows[range(len(tokens)), tokens] = gap
    return rows


def point_masses(tokens, vocab=8):
    rows = torch.full((len(tokens), vocab), -torch.inf)
    rows[range(len(tokens)), tokens] = 0.0
    return Distributions(rows, None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_looks_no_further_than_it_must(device, monkeypatch):
    """Row by row on a CPU, all rows at once on a GPU, the one after the drafts included."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    measured, original = [], Typical.measure

    def measure(self, at):
        measured.append(at.raw.shape[0])
        return original(self, at)

    monkeypatch.setattr(Typical, "measure", measure)
    logits = wanting([1, 2, 3, 4, 5, 6], gap=9.0).to(device)
    verdict = judge("typical", [1, 2, 0, 0, 0], logits)
    assert outcomes(verdict) == [EXACT, EXACT, REJECTED, NOT_REACHED, NOT_REACHED]
    assert measured == ([1] if device == "cpu" else [6])


@pytest.mark.parametrize(
    ("drafts", "rows", "message"),
    [([1], 3, "must have 2 rows"), ([9], 2, "between 0 and 3"), ([-1], 2, "between 0 and 3")],
)
def test_arguments_that_cannot_be_judged(drafts, rows, message):
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
def test_distributions_that_are_needed(rule, draft, message):
    with pytest.raises(InvalidArgumentError, match=message):
        judge(
            rule, [1, 2], torch.zeros(3, 8), sampling=SamplingParams(1.0),
            draft_distributions=draft,
        )  # fmt: skip


def test_windows_that_end_with_their_round_cannot_be_open():
    with pytest.raises(InvalidArgumentError, match="'fly' end with their round"):
        judge("fly", [1], torch.zeros(2, 8), start_position=9, open_window=OpenWindow(3, 0, 1, 0.0))


@pytest.mark.parametrize(
    ("sampling", "value", "row"),
    [(SamplingParams(), math.nan, 3), (SamplingParams(0.8), math.inf, 0)],
)
@pytest.mark.parametrize("name", RULE_PRESETS)
def test_logits_that_are_not_finite_are_refused(name, row, value, sampling):
    drafts = [0, 1, 2]
    logits = wanting([0, 1, 2, 3], gap=30.0)
    given = {"sampling": sampling, "draft_distributions": point_masses(drafts)}
    given |= {"hidden_rows": torch.zeros(4, 3), "autojudge": random_judge(3)}
    judge(name, drafts, logits, **given)
    logits[row, 5] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        judge(name, drafts, logits, **given)


ACROSS, NORMALIZED = WindowScope.ACROSS_ROUNDS, EntropyMeasure.NORMALIZED
CLOSED = [  # whatever the window
    Rule("fly", 0, 1.0, None, NORMALIZED),
    Rule("fly-paper", 0, 1.0, None, NORMALIZED, ACROSS),
    Rule("fly-reference", 0, 1.0, None, NORMALIZED),
    Rule("margin", 0, margin_threshold=0.0),
    Rule("random", 0, random_acceptance=0.0, window_scope=ACROSS),
    Rule("kl", 0, divergence_threshold=0.0),
    Rule("mars", 0, mars_ratio=1.0, window_scope=ACROSS),
    *(Rule("fuzzy", 0, divergence=kind, divergence_threshold=0.0) for kind in Divergence),
]
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
@pytest.mark.parametrize("rule", [*CLOSED, *WIDE], ids=str)
def test_limits_give_exact(rule, temperature):
    """Uniform rows make the entropy 1 and the margin 0 exactly; q = p makes divergences 0."""
    if rule.name == "fly-reference" and temperature > 0:
        pytest.skip("its second sample is a match of its own, whatever the gate")
    generator = torch.Generator().manual_seed(3)
    for seed in range(9):
        logits = torch.randn(9, 16, generator=generator)
        logits[seed % 9] = 0.0
        sampling = SamplingParams(temperature)
        own = choose_processed(process_logits(logits, sampling), sampling, range(9), seed)
        drafts = torch.randint(0, 16, (8,), generator=generator).tolist()
        drafts[::2] = own[:8:2].tolist()
        given = {"sampling": sampling, "seed": seed}
        q = Distributions((logits[:8] / (temperature or 1.0)).log_softmax(-1), None)
        got = judge(rule, drafts, logits, draft_distributions=q, **given)
        assert got == judge("exact", drafts, logits, **given)
