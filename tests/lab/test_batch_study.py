"""The study of concurrent requests: what is said of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.values.admin import ModelInfo
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.speed import BatchSample
from flyspec_lab.options import StudyOptions
from flyspec_lab.studies import batch
from flyspec_lab.studies.batch import BATCHES, section_of

MODES = ["plain", *(condition.name for condition in BATCHES.rules)]


def samples(fly=2.0, exact=1.0, repeats=6):
    """Return runs in which plain decoding makes 100 tokens per second, slower in each repeat."""
    rates = dict.fromkeys(MODES, 1.0) | {"fly": fly, "exact": exact}
    return [
        BatchSample("task", size, repeat, mode, (1.0 + repeat) / rate, 100, 0.1)
        for size in BATCHES.batches
        for repeat in range(repeats)
        for mode, rate in rates.items()
    ]


def claims_of(samples):
    return [claim.row(samples) for claim in BATCHES.claims]


@pytest.mark.parametrize(
    ("fly", "repeats", "holds"),
    [(1.2, 6, "yes"), (0.8, 6, "no"), (1.2, 5, "open"), (0.8, 1, "open")],
)
def test_a_claim_takes_six_repeats_that_agree(fly, repeats, holds) -> None:
    *over_plain, over_exact = claims_of(samples(fly, 2.0, repeats))
    assert ["Table 10" in source for _, source, _, _ in over_plain] == [True] * 4
    assert {(found, figures) for _, _, found, figures in over_plain} == {(holds, f"{fly:.2f}")}
    assert "53987" in over_exact[1]
    assert over_exact[2:] == ["no" if repeats == 6 else "open", f"{fly / 2:.2f}"]


def test_a_claim_is_open_where_repeats_disagree_or_nothing_was_measured() -> None:
    of = [
        replace(s, seconds=s.seconds * 9) if (s.mode, s.repeat) == ("fly", 3) else s
        for s in samples(1.2)
    ]
    assert claims_of(of)[-1][2:] == ["open", "1.20 (0.67 to 1.20)"]
    assert claims_of([])[0][2:] == ["open", "a condition has no texts yet"]


def test_the_figures_have_every_batch_size_and_few_requests() -> None:
    (figures,) = section_of(samples()).tables
    assert [row[:2] for row in figures.rows] == [["task", mode] for mode in MODES]
    assert list(figures.columns[2:]) == list(map(str, BATCHES.batches))
    assert [len(task.problems) for task in BATCHES.problems(StudyOptions())] == [64]
    assert [len(task.problems) for task in BATCHES.problems(StudyOptions(problems=9))] == [9]


class QuietMode:
    """Answers at once."""

    concurrent = True

    def __init__(self, name):
        self.name = name

    async def run(self, item):
        return Sample(item.group, item.index, 0, self.name, 0.001, 10, first_token_s=0.001)


class NoNoise:
    async def fill(self):
        pass


async def test_every_condition_is_measured_at_every_batch_size(monkeypatch) -> None:
    monkeypatch.setattr(batch, "flyspec_modes", lambda *_: list(map(QuietMode, MODES)))
    monkeypatch.setattr(batch, "Noise", lambda *_: NoNoise())
    o = StudyOptions(problems=2, repeats=2)
    target = ModelInfo("big", "", 100, 100)
    found = await batch.measure(BATCHES, BATCHES.problems(o), None, target, o)
    assert len(found) == 2 * len(MODES) * len(BATCHES.batches)
    assert {s.mode for s in found} == set(MODES)
