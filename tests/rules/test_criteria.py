"""Criteria where rounding or a probability of 0 could distort them."""

from __future__ import annotations

import math

import torch

from flyspec.engine.distributions import Distributions
from verify_service.rules.criteria.divergence import (
    comparable,
    jensen_shannon,
    kl,
    reversed_jensen_shannon,
    total_variation,
)
from verify_service.rules.speculative_sampling import residual_log_weights


def point_masses(tokens: list[int], vocab: int = 8) -> Distributions:
    rows = torch.full((len(tokens), vocab), -torch.inf)
    rows[range(len(tokens)), tokens] = 0.0
    return Distributions(rows, None)


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
