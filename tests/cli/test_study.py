"""`flyspec study`: lists studies, writes a report, goes on with one that is there."""

from __future__ import annotations

import pytest

from flyspec.bundled import DRAFT, TARGET
from tests.cli.processes import invoke

pytestmark = pytest.mark.slow


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


SMALL = ["--problems", "1", "--max-tokens", "12", "--threads", "1", "--draft-threads", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Studies of the bundled pair, in one run: their directory, and what was said."""
    output = tmp_path_factory.mktemp("studies")
    (prompts := output / "prompts.txt").write_text("Tom has 3 apples and\n")
    done = invoke(
        "study", "draft-models", "strict-open", "--output", str(output), *SMALL,
        "--task", "word_problems", "--task", f"open_ended={prompts}",
    )  # fmt: skip
    assert done.code == 0, done.err
    return output, done


def page(output, name) -> str:
    return (output / name / "report.html").read_text()


def test_a_study_asks_its_question_on_every_task(run) -> None:
    output, done = run
    html = page(output, "strict-open")
    assert "1 of word_problems; 1 of open_ended; seed 7" in html
    assert "open tasks gain more than strict ones (fly)" in html
    assert html.count("<svg") == 2
    assert "strict-open: Do rules gain less" in done.err


def test_further_draft_models_join_the_bundled_pair(run) -> None:
    html = page(run[0], "draft-models")
    assert html.index("drafter = bytes") < html.index("drafter = target")
    assert "another tokenizer than the target&#x27;s" in html
    assert "times of a round" in html


def test_a_study_goes_on_and_one_that_a_pair_cannot_answer_is_skipped(tmp_path) -> None:
    study = ["study", "margin", "multi-level", "fuzzy", "--output", str(tmp_path), *SMALL]
    pair = ["--model", str(TARGET), "--draft", f"small={DRAFT}"]
    done = invoke(*study, *pair)
    assert done.code == 0, done.err
    for name in ("multi-level", "fuzzy"):
        assert f"{name}: skipped: it needs a draft model (--draft-model)" in done.err
        assert not (tmp_path / name).exists()
    assert "1 of word_problems; seed 7" in page(tmp_path, "margin")
    again = invoke(*study, *pair, "--problems", "2")
    assert again.code == 0, again.err
    assert "2 of word_problems; seed 7" in page(tmp_path, "margin")
    assert "of 18 texts are there already" in again.err


@pytest.mark.full
def test_fuzzys_report_has_the_rival_and_divergences(tmp_path) -> None:
    done = invoke("study", "fuzzy", "--problems", "3", "--output", str(tmp_path), "--threads", "1")
    assert done.code == 0, done.err
    html = page(tmp_path, "fuzzy")
    assert html.count("<svg") == 2
    for text in ("draft alone", "fuzzy-reference, tv", "by data set"):
        assert text in html
