"""`flyspec bench prediction`: its predictions, its figures, the command; not times."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.predicted import (
    MISLEADING,
    NONE,
    RENAMED,
    SAME,
    USELESS,
    predictions_of,
    report,
)
from tests.tiny import make_model


def test_the_most_frequent_name_is_changed_throughout() -> None:
    found = predictions_of("Mia has 3. Tom sees Mia; Miami is far from Mia.")
    assert found == {
        NONE: "",
        SAME: "Mia has 3. Tom sees Mia; Miami is far from Mia.",
        RENAMED: "aiM has 3. Tom sees aiM; Miami is far from aiM.",
        USELESS: "Volcanic islands rise where plates drift over p",
        MISLEADING: ".aiM morf raf si imaiM ;aiM sees moT .3 sah aiM",
    }
    assert RENAMED not in predictions_of("no name is here twice")
    assert RENAMED not in predictions_of("")


def sample(prompt: int, mode: str, repeat: int, rounds: int, seconds: float) -> Sample:
    text = [prompt] if mode != USELESS or prompt else [9]
    return Sample("g", prompt, repeat, mode, seconds, 1, text, rounds=rounds)


def test_figures_are_relative_to_the_same_prompt_without() -> None:
    samples = [sample(0, "plain", 0, 0, 0.0), sample(1, "plain", 0, 0, 0.0)]
    for repeat in range(3):
        for prompt, scale in ((0, 1), (1, 10)):
            samples.append(sample(prompt, NONE, repeat, 10 * scale, 2.0 * scale))
            samples.append(sample(prompt, SAME, repeat, 4 - 2 * prompt, (1.0 + repeat) * scale))
            samples.append(sample(prompt, USELESS, repeat, 10 * scale, 2.0 * scale))
    none, same, useless = report(samples)
    assert [r.prediction for r in (none, same, useless)] == [NONE, SAME, USELESS]
    assert (none.rounds_ratio, none.time_ratio, none.same_text) == (1.0, 1.0, 2)
    assert (same.rounds, same.most_rounds) == (3, 4)
    assert same.rounds_ratio == pytest.approx((0.4 + 0.02) / 2)
    assert same.worst_rounds_ratio == pytest.approx(0.4)
    assert (same.time_ratio, same.worst_time_ratio) == (1.0, 1.0)
    assert (useless.prompts, useless.same_text) == (2, 1)


def test_the_command(tmp_path: Path) -> None:
    seeds = count(3)
    models = [str(make_model(tmp_path / name, next(seeds))) for name in ("target", "draft")]
    prompts, output = tmp_path / "prompts", tmp_path / "prediction.json"
    prompts.write_text("the cat\nthe dog\n")
    result = CliRunner().invoke(app, [
        "bench", "prediction", "--model", models[0], "--draft-model", models[1], "--repeats", "2",
        "--prompt-file", str(prompts), "--max-tokens", "24", "--output", str(output),
    ])  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "as predicted" in result.stdout
    document = json.loads(output.read_text())
    reports = document["predictions"]
    assert [r["prediction"] for r in reports[:2]] == [NONE, SAME]
    assert all(r["same_text"] == r["prompts"] for r in reports)
    assert all(1 <= r["rounds"] <= r["most_rounds"] <= 24 for r in reports)
    assert len([s for s in document["samples"] if s["mode"] == USELESS]) == 4
