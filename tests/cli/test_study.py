"""`flyspec study`: lists studies, writes a report, goes on with one that is there."""

from __future__ import annotations

import pytest

from flyspec import bundled
from tests.cli.processes import invoke


def test_studies_are_listed_and_mistakes_are_named() -> None:
    done = invoke("study")
    assert done.code == 0
    assert "window" in done.out
    assert "?" in done.out.splitlines()[0]
    done = invoke("study", "windows")
    assert done.code == 2
    assert "did you mean window?" in done.err


def test_a_report_is_written_and_gone_on_with(tmp_path) -> None:
    study = ["study", "margin", "--output", str(tmp_path), "--threads", "1"]
    done = invoke(*study, "--problems", "2")
    assert done.code == 0, done.err
    html = (tmp_path / "margin" / "report.html").read_text()
    assert "margin_threshold" in html
    assert html.count("<svg") == 2
    assert "2 of word_problems" in html
    again = invoke(*study, "--problems", "3", "--mixed-versions")
    assert again.code == 0, again.err
    assert "3 of word_problems" in (tmp_path / "margin" / "report.html").read_text()


@pytest.mark.full
def test_fuzzys_report_has_both_parts_the_rival_and_divergences(tmp_path) -> None:
    done = invoke("study", "fuzzy", "--problems", "3", "--output", str(tmp_path), "--threads", "1")
    assert done.code == 0, done.err
    html = (tmp_path / "fuzzy" / "report.html").read_text()
    assert html.count("<svg") == 5
    for text in ("draft alone", "fuzzy-reference TV", "The paper&#39;s bound", "by data set"):
        assert text in html
    for part in ("greedy", "sampled"):
        assert (tmp_path / "fuzzy" / part / "run.json").is_file()


def test_a_study_of_two_models_asks_for_the_other(tmp_path) -> None:
    done = invoke("study", "fuzzy", "--output", str(tmp_path), "--model", str(bundled.TARGET))
    assert done.code == 2
    assert "--draft-model" in done.err
