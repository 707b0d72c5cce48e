"""Rounds of a text at any K, against formulas and a replay of texts token by token."""

from __future__ import annotations

import random

import pytest

from flyspec.values.tokens import Origin
from flyspec_lab.planning.acceptance import AgreeingRuns


def decode(agrees: list[bool], k: int) -> list[Origin]:
    """Return the origins of a text under `exact`: the first token plain, then rounds of K."""
    origins = [Origin.PLAIN]
    while (start := len(origins)) < len(agrees):
        drafts = min(k, len(agrees) - start - 1)
        accepted = next((i for i in range(drafts) if not agrees[start + i]), drafts)
        origins += [Origin.EXACT_MODEL] * accepted
        origins.append(Origin.BONUS if accepted == drafts else Origin.CORRECTION)
    return origins


def rounds(origins: list[Origin]) -> int:
    return sum(o in (Origin.BONUS, Origin.CORRECTION) for o in origins)


def texts(number: int, length: int, seed: int = 1) -> list[list[bool]]:
    """Return whether a drafter agrees at each token: less surely the longer it has, not forever."""
    rng = random.Random(seed)
    found = []
    for _ in range(number):
        agrees, age = [], 0
        for _ in range(length):
            agreed = rng.random() < (0.97 if age < 4 else 0.85)
            agrees.append(agreed)
            age = age + 1 if agreed else 0
        found.append(agrees)
    return found


@pytest.mark.parametrize("k", [1, 4, 15])
def test_tokens_that_agree_by_chance_make_the_geometric_sum(k) -> None:
    p = 0.8
    runs = AgreeingRuns((1.0, p), p)
    assert runs.tokens_per_round(k) == pytest.approx((1 - p ** (k + 1)) / (1 - p))
    assert runs.whole(k) == pytest.approx(p ** (k + 1))


def test_counts_by_hand() -> None:
    # Runs of 3 and 1 tokens; of the first 3, one is decoded plainly, and the end is a bonus.
    runs = AgreeingRuns.of([decode([True, True, True, False, True, False] * 20, 15)])
    assert runs.survival[:2] == (1.0, 1.0)
    assert runs.survival[2] == pytest.approx(20 / 39)
    assert runs.survival[3] == pytest.approx(20 / 39 * 19 / 20)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 15, 24])
def test_a_measurement_at_one_k_gives_the_rounds_at_others(k) -> None:
    every = texts(400, 80)
    runs = AgreeingRuns.of([decode(agrees, 15) for agrees in every])
    counted = sum(rounds(decode(agrees, k)) for agrees in every) / len(every)
    assert runs.rounds(k, 79) == pytest.approx(counted, rel=0.02)


def test_texts_that_always_agree_have_full_rounds() -> None:
    runs = AgreeingRuns.of([decode([True] * 100, 15)])
    assert runs.tokens_per_round(7) == pytest.approx(8.0)
    assert runs.rounds(7, 80) == pytest.approx(10.0 + 3.5 / 8)  # 8 tokens, ending anywhere


def test_texts_that_never_agree_have_a_token_a_round() -> None:
    runs = AgreeingRuns.of([decode([False] * 50, 15)])
    assert (runs.tokens_per_round(7), runs.whole(7)) == (1.0, 0.0)
    assert runs.rounds(7, 49) == pytest.approx(49)


def test_without_drafts_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="nothing was drafted"):
        AgreeingRuns.of([[Origin.PLAIN] * 5])
