"""The study of concurrent requests: what is measured again, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.errors import ConfigError
from flyspec.values.admin import DrafterState, DrafterStatus, ModelInfo
from flyspec_lab.bench.modes import Item, Sample
from flyspec_lab.bench.speed import BatchSample, measure_batches
from flyspec_lab.options import StudyOptions
from flyspec_lab.studies import batch
from flyspec_lab.studies.batch import BATCHES, batch_report, measure
from flyspec_lab.studies.study import CLAIMS_HEADING

TARGET = ModelInfo("big", "", 100, 100, weights_fingerprint="w")
MODES = ["plain", *(condition.name for condition in BATCHES.conditions)]


class QuietMode:
    """Answers at once, and counts its runs."""

    concurrent = True

    def __init__(self, name):
        self.name, self.runs = name, 0

    async def run(self, item):
        self.runs += 1
        return Sample(item.group, item.index, 0, self.name, 0.001, 10, first_token_s=0.001)


class NoNoise:
    async def fill(self):
        pass


ITEMS = [[Item("task", i, "prompt") for i in range(3)]]


async def test_only_what_is_not_known_is_measured() -> None:
    modes, kept = [QuietMode("plain"), QuietMode("fly")], []
    whole = await measure_batches(modes, ITEMS, (1, 4), 2, NoNoise(), on_set=kept.append)
    sets = [(s.batch, s.repeat) for s in whole[::2]]
    assert sets == [(1, 0), (4, 0), (1, 1), (4, 1)]
    assert [sample for of in kept for sample in of] == whole
    # Every set has each mode; the largest batch ran once more before it counted.
    assert [mode.runs for mode in modes] == [4 + 2 * (3 + 4)] * 2

    modes, added = [QuietMode("plain"), QuietMode("fly")], []
    known = [s for s in whole if (s.batch, s.repeat) != (4, 1)]
    again = await measure_batches(modes, ITEMS, (1, 4), 2, NoNoise(), known, added.append)
    assert again[: len(known)] == known
    assert [(s.batch, s.repeat) for of in added for s in of] == [(4, 1)] * 2
    assert [mode.runs for mode in modes] == [4 + 4] * 2

    modes = [QuietMode("plain"), QuietMode("fly")]
    assert await measure_batches(modes, ITEMS, (1, 4), 2, NoNoise(), whole) == whole
    assert [mode.runs for mode in modes] == [0, 0]


def samples(fly=2.0, exact=1.0, repeats=6):
    """Return runs in which plain decoding makes 100 tokens per second, slower in each repeat."""
    rates = dict.fromkeys(MODES, 1.0) | {"fly": fly, "exact": exact}
    return [
        BatchSample("task", size, repeat, mode, (1.0 + repeat) / rate, 100, 0.1)
        for size in BATCHES.batches
        for repeat in range(repeats)
        for mode, rate in rates.items()
    ]


def report(of):
    drafters = [
        DrafterStatus("model", "model", True, "", TARGET, DrafterState.ACTIVE),
        DrafterStatus("other", "model", True, "", TARGET),
    ]
    o = StudyOptions(problems=9)
    return batch_report(BATCHES, of, BATCHES.problems(o), TARGET, drafters, o, "flyspec")


@pytest.mark.parametrize(
    ("fly", "repeats", "holds"),
    [(1.2, 6, "yes"), (0.8, 6, "no"), (1.2, 5, "open"), (0.8, 1, "open")],
)
def test_a_claim_takes_six_repeats_that_agree(fly, repeats, holds) -> None:
    claims = report(samples(fly, 2.0, repeats)).sections[0]
    assert claims.heading == CLAIMS_HEADING
    *over_plain, over_exact = claims.tables[0].rows
    assert ["Table 10" in source for _, source, _, _ in over_plain] == [True] * 4
    assert {(found, figures) for _, _, found, figures in over_plain} == {(holds, f"{fly:.2f}")}
    assert "53987" in over_exact[1]
    assert over_exact[2:] == ["no" if repeats == 6 else "open", f"{fly / 2:.2f}"]


def test_a_claim_is_open_where_repeats_disagree() -> None:
    of = [
        replace(s, seconds=s.seconds * 9) if (s.mode, s.repeat) == ("fly", 3) else s
        for s in samples(1.2)
    ]
    _, _, holds, figures = report(of).sections[0].tables[0].rows[-1]
    assert holds == "open"
    assert figures == "1.20 (0.67 to 1.20)"


def test_a_report_has_every_batch_size() -> None:
    found = report(samples())
    (figures,) = found.sections[1].tables
    assert [row[1:3] for row in figures.rows[: len(MODES)]] == [[mode, "1"] for mode in MODES]
    assert len(figures.rows) == len(MODES) * len(BATCHES.batches)
    assert found.facts["requests"] == "9 of word_problems per run, seed 7, 6 repeats, K 15"
    assert "drafter model" in found.facts
    assert "drafter other" not in found.facts
    assert found.page().count("<svg") == 1


async def test_runs_are_kept_and_gone_on_with(tmp_path, monkeypatch) -> None:
    modes = []

    def quiet_modes(*_):
        modes[:] = map(QuietMode, MODES)
        return modes

    monkeypatch.setattr(batch, "flyspec_modes", quiet_modes)
    monkeypatch.setattr(batch, "Noise", lambda *_: NoNoise())
    o = StudyOptions(problems=2, repeats=1)

    async def run(o, target=TARGET):
        return await measure(BATCHES, BATCHES.problems(o), None, target, [], o, tmp_path / "batch")

    first = await run(o)
    assert len(first) == len(MODES) * len(BATCHES.batches)
    assert await run(o) == first
    assert [mode.runs for mode in modes] == [0] * len(MODES)
    more = await run(replace(o, repeats=2))
    assert more[: len(first)] == first
    assert len(more) == 2 * len(first)
    with pytest.raises(ConfigError, match=r"prompts: was 2, is 3"):
        await run(replace(o, problems=3))
    with pytest.raises(ConfigError, match=r"weights_fingerprint: was 'w', is 'v'"):
        await run(o, replace(TARGET, weights_fingerprint="v"))
