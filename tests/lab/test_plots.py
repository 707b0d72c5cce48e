"""Plots name what they show: rules, thresholds, the front."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyspec_lab import compare
from flyspec_lab.answered import Answered
from flyspec_lab.arms import rival_arm
from flyspec_lab.drawing import to_svg
from flyspec_lab.plots import (
    _common_start,
    _gap_place,
    draw_gaps,
    plot_quality,
    size_of_gaps,
    size_of_quality,
)
from tests.lab.test_compare import made


def test_a_plot_names_rules_and_thresholds(tmp_path: Path) -> None:
    rules = "exact,fly:fly_entropy_threshold=0.2,fly:fly_entropy_threshold=0.6"
    rows = {
        "fly:fly_entropy_threshold=0.2": [{"num_rounds": 1, "score": i > 0} for i in range(8)],
        "fly:fly_entropy_threshold=0.6": [{"num_rounds": 2}] * 8,
    }
    arms, wanted, found = made(rules, 8, rows=rows)
    reports = {"task": compare.report(Answered("task", arms, wanted, found)), "empty": []}
    for name in ("plot.svg", "plot.png"):
        plot_quality(tmp_path / name, [*arms, rival_arm("small")], reports)
    svg = (tmp_path / "plot.svg").read_text()
    shown = [
        "task, 8 problems", "exact", "fly", ">0.2<", ">0.6<", "Pareto front", "plain",
        "tokens per round", "tokens per second, relative to exact", "recovery",
    ]  # fmt: skip
    assert [text for text in shown if text not in svg] == []
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_without_answers_the_likelihood_is_shown(tmp_path: Path) -> None:
    unknown = [{"score": None, "log_likelihood": -4.0}] * 3
    arms, wanted, found = made("fly", 3, rows={"plain": unknown, "fly": unknown})
    reports = {"task": compare.report(Answered("task", arms, wanted, found))}
    plot_quality(tmp_path / "plot.svg", arms, reports)
    assert "log p per token, nats" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize(
    ("gap", "place"), [(0.0, 0.0), (0.05, 1.0), (0.15, 2.5), (11.0, 13.75), (99.0, 14.5)]
)
def test_a_mean_lies_in_its_bin(gap: float, place: float) -> None:
    assert _gap_place(gap) == pytest.approx(place)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_every_condition_has_a_histogram(tmp_path: Path, count: int) -> None:
    rules = ",".join(f"margin:margin_threshold={i / 10}" for i in range(1, count))
    loose = {"num_loose_tokens": 1, "loose_gaps_nats": [0.2], "rejected_gaps_nats": [5.0]}
    names = [f"margin:margin_threshold={i / 10}" for i in range(1, count)]
    arms, wanted, found = made(rules or "plain", 2, rows={name: [loose] * 2 for name in names})
    reports = compare.report(Answered("task", arms, wanted, found))
    svg = to_svg(size_of_gaps(reports), lambda figure: draw_gaps(figure, reports))
    assert all(f">{report.condition}<" in svg for report in reports)
    assert svg.count("per 1,000 tokens") == -(-count // 3)
    assert svg.count("gap, nats") == min(count, 3)


def test_labels_keep_whole_numbers() -> None:
    assert _common_start(["random_acceptance=0.1", "random_acceptance=0.3"]) == "random_acceptance="
    assert _common_start(["fly, theta = 0.1", "fly, theta = 0.15"]) == "fly, theta = "
    assert _common_start(["a", "b"]) == ""


def test_what_keeps_little_is_written_at_the_edge(tmp_path: Path) -> None:
    rules = "exact,margin,kl,random"
    rows = {"random": [{"score": float(i % 2)} for i in range(8)]}
    arms, wanted, found = made(rules, 8, rows=rows)
    reports = {"task": compare.report(Answered("task", arms, wanted, found))}
    plot_quality(tmp_path / "plot.svg", arms, reports)
    svg = (tmp_path / "plot.svg").read_text()
    assert svg.count(">50%<") == 2
    assert ">50.0%<" not in svg


def test_many_names_are_below_the_plots() -> None:
    few = made("exact,fly", 2)[0]
    thresholds = [
        f"fuzzy:divergence={d},fly_window_size={w}" for d in ("js", "kl", "tv") for w in range(4)
    ]
    many = made(",".join(["exact", *thresholds]), 2)[0]
    reports = {"task": [object()]}
    (wide, low), (narrow, high) = size_of_quality(few, reports), size_of_quality(many, reports)
    assert wide > narrow
    assert low < high
