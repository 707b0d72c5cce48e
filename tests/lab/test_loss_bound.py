"""Fuzzy's bound on a loss, against distributions of texts that are known in full."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flyspec.rules import Divergence, Rule
from flyspec.rules.resolve import resolve_rule
from flyspec_lab.loss_bound import LossBound, loss_bound

TV = Divergence.TV
VOCAB, LENGTH, K = 3, 4, 2


def total_variation(p, q):
    return float(np.abs(p - q).sum()) / 2


class Pair:
    """Two models of a tiny language: a distribution for each prefix, from a seed."""

    def __init__(self, seed, noise):
        rng = np.random.default_rng(seed)
        self.p, self.q = {}, {}
        for length in range(LENGTH):
            for prefix in itertools.product(range(VOCAB), repeat=length):
                self.p[prefix] = rng.dirichlet(np.ones(VOCAB))
                mixed = (1 - noise) * self.p[prefix] + noise * rng.dirichlet(np.ones(VOCAB))
                self.q[prefix] = mixed / mixed.sum()


def texts_of(pair, threshold):
    """Return each text's probability under the rule, and the expected number of draft tokens.

    Rounds of K drafts, then one token of the target; a draft is kept where the distributions are
    closer than the threshold, else the target's sample takes its place and ends the round.
    """
    probabilities, drafted = {}, 0.0
    states = [((), 0, 1.0)]  # text, drafts so far in this round, probability
    while states:
        text, at, weight = states.pop()
        if len(text) == LENGTH:
            probabilities[text] = probabilities.get(text, 0.0) + weight
            continue
        close = total_variation(pair.p[text], pair.q[text]) < threshold
        kept = at < K and close
        row = pair.q[text] if kept else pair.p[text]
        drafted += weight if kept else 0.0
        states += [((*text, t), at + 1 if kept else 0, weight * row[t]) for t in range(VOCAB)]
    return probabilities, drafted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [0.02, 0.05, 0.1, 0.3])
def test_no_score_loses_more(seed, threshold):
    pair = Pair(seed, noise=0.25)
    plain, none = texts_of(pair, 0.0)
    found, drafted = texts_of(pair, threshold)
    assert none == 0
    assert sum(found.values()) == pytest.approx(1.0)
    # The score that loses most is 1 for the texts that have become less likely, and else 0.
    worst = sum(max(0.0, plain[text] - found[text]) for text in plain)
    rule = resolve_rule(Rule("fuzzy", divergence=TV, divergence_threshold=threshold), 15)
    bound = loss_bound(rule, LENGTH, drafted / LENGTH)
    assert bound is not None
    assert worst <= bound.value + 1e-12


def test_its_value():
    bound = LossBound(tokens=80.0, draft_share=0.5, threshold=0.02)
    assert bound.value == pytest.approx(0.8)
    assert str(bound) == "0.80"
    assert str(LossBound(80.0, 0.9, 0.1)) == "7.20, says nothing"


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        (Rule("fuzzy", divergence=TV), True),
        (Rule("fuzzy", divergence=TV, fly_window_size=4), False),
        (Rule("fuzzy"), False),
        (Rule("fuzzy", divergence=Divergence.KL), False),
        (Rule("fuzzy-reference", divergence=TV), True),
        (Rule("kl", divergence=TV), False),
        (Rule("fly"), False),
        (Rule("exact"), False),
    ],
)
def test_where_it_holds(rule, holds):
    resolved = resolve_rule(rule, 15)
    assert (loss_bound(resolved, 80.0, 0.9) is not None) == holds
