"""A round with more drafts than requested is judged as several consecutive rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.rules import Rule
from flyspec.values.rounds import Budget, Outcome
from flyspec.values.tokens import SamplingParams
from tests.examples import examples
from verify_service.rules import judge

EOS, CONTROL, VOCABULARY, LENGTH = 0, 1, 12, 96
RULES = {
    "exact": {},
    "fly": {"fly_window_size": 2, "fly_entropy_threshold": 0.1},
    "fly-paper": {"fly_window_size": 1},
    "fly-reference": {"fly_window_size": 2},
    "margin": {"margin_threshold": 1.0, "fly_window_size": 1, "window_scope": 1},
    "typical": {},
    "fuzzy": {"divergence_threshold": 0.4},
    "fuzzy-reference": {},
    "kl": {"divergence_threshold": 0.4},
    "relaxed": {"relaxed_delta": 0.2},
    "mars": {"mars_ratio": 0.6},
    "random": {"random_acceptance": 0.5, "random_judges_matches": True},
    "rejection": {},
    "ensemble": {"ensemble_weight": 0.3},
    "cactus": {"cactus_delta": 1.0},
}


class Text(NamedTuple):
    """The target's and drafter's token at each position, whatever precedes it."""

    logits: Tensor
    drafts: list[int]
    draft_log_probs: Tensor

    @classmethod
    def drawn(cls, seed, agreement):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
        logits[:, EOS] -= 2.0
        noise = torch.rand(LENGTH, generator=generator) < agreement
        others = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        drafts = torch.where(noise, logits.argmax(dim=-1), others)
        near = logits + 0.3 * torch.randn(LENGTH, VOCABULARY, generator=generator)
        return cls(logits, drafts.tolist(), near.log_softmax(dim=-1))


def tokens_of(text, rule, k, judged, budget, temperature):
    """The result with rounds of `k` drafts."""
    tokens = []
    while len(tokens) + k < LENGTH and EOS not in tokens:
        start = len(tokens)
        verdict = judge(
            rule,
            text.drafts[start : start + k],
            text.logits[start : start + k + 1],
            sampling=SamplingParams(temperature),
            seed=7,
            start_position=start,
            eos_token_ids=[EOS],
            control_token_ids=[CONTROL],
            budget=budget,
            exact_until_position=5,
            draft_distributions=Distributions(text.draft_log_probs[start : start + k], None),
            num_speculative_tokens=judged,
        )
        tokens += text.drafts[start : verdict.keep_length]
        tokens.append(verdict.next_token_id)
        loose = [d for d in verdict.decisions if d.outcome is Outcome.LOOSE]
        if budget.loose_tokens is not None:
            budget = replace(budget, loose_tokens=budget.loose_tokens - len(loose))
        if budget.loose_cost_nats is not None:
            spent = math.fsum(d.gap_nats or 0.0 for d in loose)
            budget = replace(budget, loose_cost_nats=max(0.0, budget.loose_cost_nats - spent))
    return tokens


@pytest.mark.parametrize("name", RULES)
@given(
    seed=st.integers(0, 2**32),
    agreement=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    k=st.integers(1, 8),
    times=st.integers(1, 5),
    loose_tokens=st.sampled_from([None, None, 3]),
    loose_cost_nats=st.sampled_from([None, None, 2.0]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=examples(4))
def test_the_text_is_that_of_rounds_of_the_k_that_was_requested(
    name, seed, agreement, k, times, loose_tokens, loose_cost_nats, temperature
):
    rule = Rule(name, **RULES[name])
    text = Text.drawn(seed, agreement)
    budget = Budget(loose_tokens, loose_cost_nats)
    long = tokens_of(text, rule, times * (k + 1) - 1, k, budget, temperature)
    short = tokens_of(text, rule, k, 0, budget, temperature)
    count = min(len(long), len(short))
    assert count > 0
    assert long[:count] == short[:count]


def test_a_round_that_is_not_longer_is_one():
    text, rule = Text.drawn(3, 0.8), Rule("fly", 2)
    rows, drafts = text.logits[:9], text.drafts[:8]
    assert judge(rule, drafts, rows) == judge(rule, drafts, rows, num_speculative_tokens=8)


def test_where_a_bonus_would_be_only_the_targets_own_token_stands():
    rows = torch.zeros(8, VOCABULARY)  # as unsure as can be: every mismatch may stand
    rows[:, 5] = 0.01
    rule = Rule("fly", 0)
    verdict = judge(rule, [5, 6, 5, 6, 5, 5, 6], rows, num_speculative_tokens=3)
    outcomes = [decision.outcome for decision in verdict.decisions]
    assert outcomes[:4] == [Outcome.EXACT, Outcome.LOOSE, Outcome.EXACT, Outcome.REJECTED]
    verdict = judge(rule, [5, 6, 5, 5, 6, 5, 6], rows, num_speculative_tokens=3)
    assert verdict.num_accepted == 7
