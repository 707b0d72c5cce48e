"""Training on labels that are known, and thresholds against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyspec.errors import ConfigError
from flyspec_lab.training.judge import fit, operating_points, threshold_for
from flyspec_lab.training.mining import Mismatch

SIZE = 6


def mismatches(problems: int, noise: float, seed: int = 3) -> list[Mismatch]:
    """Five a problem; important where the sum of two numbers, with noise, is large."""
    gen = np.random.default_rng(seed)
    found = []
    for problem, index in itertools.product(range(problems), range(5)):
        row = gen.normal(size=SIZE) * 3 + 1
        important = bool(row[0] - row[4] + gen.normal() * noise > 2.0)
        found.append(Mismatch(problem, index, 1, 2, important, torch.tensor(row).float()))
    return found


def test_what_is_linear_is_found() -> None:
    tensors, facts = fit(mismatches(200, noise=0.0), seed=1, recall=0.9)
    assert facts["auc"] > 0.99
    assert (facts["prompts"], facts["labels"]) == (200, 1000)
    assert (facts["held_out_prompts"], facts["held_out_labels"]) == (40, 200)
    weight = tensors["weight"] / tensors["scale"]
    assert weight[0] > 5 * weight[[1, 2, 3, 5]].abs().max()
    assert weight[4] < -5 * weight[[1, 2, 3, 5]].abs().max()


def test_noise_has_an_auc_of_a_half() -> None:
    gen = np.random.default_rng(5)
    pure = mismatches(200, noise=0.0)
    labels = gen.permutation([each.important for each in pure])
    mixed = [
        Mismatch(m.problem, m.output_token_index, 1, 2, bool(label), m.hidden)
        for m, label in zip(pure, labels, strict=True)
    ]
    assert 0.35 < fit(mixed, seed=1, recall=0.9)[1]["auc"] < 0.65


def test_the_same_seed_gives_the_same_judge_and_another_another_split() -> None:
    labels = mismatches(40, noise=2.0)
    (one, facts), (again, same), (other, _) = (fit(labels, seed, 0.9) for seed in (1, 1, 2))
    assert torch.equal(one["weight"], again["weight"])
    assert facts == same
    assert not torch.equal(one["weight"], other["weight"])


def test_too_few_of_a_kind_are_refused() -> None:
    labels = mismatches(60, noise=0.0)
    unimportant = [m for m in labels if not m.important]
    with pytest.raises(ConfigError, match="0 of them important, are too few to train"):
        fit(unimportant, 1, 0.9)
    with pytest.raises(ConfigError, match="raise --problems"):
        fit([m for m in labels if m.problem == 1], 1, 0.9)


probabilities = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.2, 0.5, 0.7, 0.9, 1.0]), st.booleans()),
    min_size=1,
    max_size=12,
).filter(lambda each: any(important for _, important in each))


@given(probabilities, st.sampled_from([0.1, 0.5, 0.75, 0.9, 1.0]))
def test_the_threshold_is_the_largest_with_the_recall(
    each: list[tuple[float, bool]], recall: float
) -> None:
    p, important = np.array([x for x, _ in each]), np.array([y for _, y in each])
    found = threshold_for(recall, p, important)

    def share(threshold: float) -> float:
        above = [x > threshold for x, y in each if y]
        return sum(above) / len(above)

    allowed = [t for t in {x for x, _ in each} if share(t) >= recall - 1e-12]
    assert found == max(allowed, default=0.0)


def test_operating_points_count() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    points = operating_points(p, np.array([0, 0, 1, 0, 1]))
    assert len(points) == 26
    assert [points[0].quantile, points[-1].quantile] == [0.0, 1.0]
    first, last = points[0], points[-1]
    assert (first.threshold, first.recall, first.precision) == (0.1, 1.0, 0.5)
    assert first.accepted == pytest.approx(0.2)
    assert (last.threshold, last.recall, last.precision, last.accepted) == (0.5, 0.0, None, 1.0)
    middle = next(each for each in points if math.isclose(each.quantile, 0.52))
    assert middle.threshold == pytest.approx(0.308)
    assert middle.recall == 0.5
