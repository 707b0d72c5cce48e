"""The plot of rules names what it shows: rules, and thresholds."""

from __future__ import annotations

from pathlib import Path

from flyspec_lab import compare
from flyspec_lab.answered import Answered
from flyspec_lab.arms import rival_arm
from flyspec_lab.drawing import save
from flyspec_lab.plots import quality_plot
from tests.lab.test_compare import made


def test_a_plot_names_rules_and_thresholds(tmp_path: Path) -> None:
    rules = "exact,fly:fly_entropy_threshold=0.2,fly:fly_entropy_threshold=0.6"
    rows = {
        "fly:fly_entropy_threshold=0.2": [{"num_rounds": 1, "score": i > 0} for i in range(8)],
        "fly:fly_entropy_threshold=0.6": [{"num_rounds": 2}] * 8,
    }
    arms, wanted, found = made(rules, 8, rows=rows)
    reports = {"task": compare.report(Answered("task", arms, wanted, found)), "empty": []}
    plot = quality_plot("quality", [*arms, rival_arm("small")], reports)
    svg = plot.svg
    shown = [
        "task, 8 problems", "exact", "fly", ">0.2<", ">0.6<", "plain",
        "tokens per round", "tokens per second, relative to exact", "recovery",
    ]  # fmt: skip
    assert [text for text in shown if text not in svg] == []
    save(tmp_path / "plot.png", plot.inches, plot.draw)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_without_answers_the_likelihood_is_shown() -> None:
    unknown = [{"score": None, "log_likelihood": -4.0}] * 3
    arms, wanted, found = made("fly", 3, rows={"plain": unknown, "fly": unknown})
    reports = {"task": compare.report(Answered("task", arms, wanted, found))}
    assert "log p per token, nats" in quality_plot("quality", arms, reports).svg
