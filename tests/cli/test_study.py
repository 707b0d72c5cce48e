"""`flyspec study`: lists studies, writes a report, goes on with one that is there."""

from __future__ import annotations

import pytest

from flyspec.bundled import DRAFT, TARGET
from tests.cli.processes import invoke


def test_studies_are_listed_and_mistakes_are_named() -> None:
    done = invoke("study")
    assert done.code == 0
    assert "window" in done.out
    assert "?" in done.out.splitlines()[0]
    done = invoke("study", "windows")
    assert done.code == 2
    assert "did you mean window?" in done.err
    done = invoke("study", "window", "--task", "gsm8k")
    assert done.code == 2
    assert "--task gsm8k: needs the path of its data set" in done.err


def test_a_report_is_written_and_gone_on_with(tmp_path) -> None:
    study = ["study", "margin", "--output", str(tmp_path), "--threads", "1"]
    done = invoke(*study, "--problems", "2")
    assert done.code == 0, done.err
    html = (tmp_path / "margin" / "report.html").read_text()
    assert "margin_threshold" in html
    assert html.count("<svg") == 2
    assert "2 of word_problems" in html
    again = invoke(*study, "--problems", "3")
    assert again.code == 0, again.err
    assert "3 of word_problems" in (tmp_path / "margin" / "report.html").read_text()


def test_a_draft_model_with_another_tokenizer_joins_the_bundled_pair(tmp_path) -> None:
    done = invoke(
        "study", "tokenizer", "--output", str(tmp_path), "--threads", "1", "--draft-threads", "1",
        "--problems", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    html = (tmp_path / "tokenizer" / "report.html").read_text()
    assert "drafter = bytes" in html
    assert "another tokenizer than the target&#39;s" in html
    assert "draft, 0.95 M parameters" in html


def test_a_study_that_another_pair_cannot_answer_is_skipped(tmp_path) -> None:
    pair = ["--model", str(TARGET), "--threads", "1", "--draft-threads", "1"]
    done = invoke(
        "study", "multi-level", "drafter-size", "fuzzy", "--output", str(tmp_path),
        "--problems", "1", *pair, "--draft", f"small={DRAFT}", "--draft", f"large={TARGET}",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "multi-level: skipped: it needs a draft model (--draft-model)" in done.err
    assert "fuzzy: skipped: it needs a draft model (--draft-model)" in done.err
    assert not (tmp_path / "multi-level").exists()
    html = (tmp_path / "drafter-size" / "report.html").read_text()
    assert html.index("drafter = small") < html.index("drafter = large")


def test_a_study_asks_its_question_on_every_task(tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nTom has 3 apples and\n")
    done = invoke(
        "study", "strict-open", "--output", str(tmp_path / "studies"), "--threads", "1",
        "--task", "word_problems", "--task", f"open_ended={prompts}", "--problems", "2",
        "--max-tokens", "24",
    )  # fmt: skip
    assert done.code == 0, done.err
    html = (tmp_path / "studies" / "strict-open" / "report.html").read_text()
    assert "2 of word_problems; 2 of open_ended; seed 7" in html
    assert "open tasks gain more than strict ones (fly)" in html
    assert "open_ended: figures" in html
    assert html.count("<svg") == 3


@pytest.mark.full
def test_fuzzys_report_has_both_parts_the_rival_and_divergences(tmp_path) -> None:
    done = invoke("study", "fuzzy", "--problems", "3", "--output", str(tmp_path), "--threads", "1")
    assert done.code == 0, done.err
    html = (tmp_path / "fuzzy" / "report.html").read_text()
    assert html.count("<svg") == 5
    for text in ("draft alone", "fuzzy-reference TV", "the bound on the loss", "by data set"):
        assert text in html
    for part in ("greedy", "sampled"):
        assert (tmp_path / "fuzzy" / part / "run.json").is_file()
