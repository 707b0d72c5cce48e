"""Reports of studies over one task and over several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flyspec_lab.answered import Answered
from flyspec_lab.evaluation import Found
from flyspec_lab.options import StudyOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.report import Report
from flyspec_lab.run import Unit, wanted_samples
from flyspec_lab.studies.catalogue import STUDIES
from flyspec_lab.studies.study import CLAIMS_HEADING, Study, evaluated
from flyspec_lab.tasks import Problem
from flyspec_lab.tasks.open_ended import OpenEnded
from tests.lab.test_compare import TARGET, rows_of, words
from tests.lab.test_studies import arms_of_run

STRICT = words("words", 6)
OPEN = TaskProblems("tales/of <two>", OpenEnded("x"), [Problem(f"{i}", "Q") for i in range(6)])
LOOSE = {
    "num_loose_tokens": 2, "loose_gaps_nats": [0.1, 0.3], "loose_cost_nats": 0.4,
    "num_rejected_tokens": 1, "rejected_cost_nats": 9.0,
}  # fmt: skip


def row_of(unit: Unit) -> dict[str, Any]:
    """Rules gain more on the open task; texts differ a little."""
    found: dict[str, Any] = {
        "score": None if unit.task is OPEN else 1.0, "log_likelihood": -3.0, "num_rounds": 10.0
    }  # fmt: skip
    if unit.arm.rule.name in ("exact", "plain"):
        return found
    rounds = (4.0 if unit.task is OPEN else 8.0) + unit.index % 3 / 4
    return {**found, **LOOSE, "num_rounds": rounds}


def report(study: Study, tasks: list[TaskProblems], without: str | None = None) -> Report:
    """Return the report of texts under all conditions but those that start with `without`."""
    run = study.run(StudyOptions(seeds=1), [])
    arms = arms_of_run(run)
    wanted = wanted_samples(run, tasks, arms, TARGET, None)
    made = {
        key: unit
        for key, unit in wanted.items()
        if without is None or not unit.arm.name.startswith(without)
    }
    rows = rows_of(made, row_of)
    found = [Found.on(Answered(t.name, arms, wanted, rows), arms, t.is_open) for t in tasks]
    return study.report(*evaluated(study, found), {})


def test_one_task_needs_no_name_in_headings() -> None:
    found = report(STUDIES["window"], [STRICT])
    assert [s.heading for s in found.sections[:2]] == [CLAIMS_HEADING, "words"]
    assert found.page().count("<svg") == 1


def test_several_tasks_have_sections_each_after_what_is_said_of_all(tmp_path: Path) -> None:
    found = report(STUDIES["strict-open"], [STRICT, OPEN])
    headings = [section.heading for section in found.sections]
    assert headings == [CLAIMS_HEADING, "words", "tales/of <two>"]
    claims = found.sections[0].tables[0].rows
    assert [row[2] for row in claims] == ["yes"] * 5
    said = [text for section in found.sections for text in section.paragraphs]
    assert len(said) == len(set(said))
    html = found.page()
    assert "tales/of &lt;two&gt;" in html
    found.write(tmp_path)
    assert len(list(tmp_path.glob("*.svg"))) == html.count("<svg")


def test_claims_say_which_of_several_tasks_they_are_about() -> None:
    found = report(STUDIES["window"], [STRICT, OPEN])
    (section,) = (s for s in found.sections if s.heading == CLAIMS_HEADING)
    assert [row[0].split(":")[0] for row in section.tables[0].rows] == [
        *["words"] * 3, *["tales/of <two>"] * 3
    ]  # fmt: skip


def test_texts_without_answers_are_described() -> None:
    found = report(STUDIES["open-ended"], [OPEN])
    (section,) = (s for s in found.sections if s.heading == OPEN.name)
    figures = section.tables[0]
    by_rule = {row[0]: dict(zip(figures.columns, row, strict=True)) for row in figures.rows}
    assert "correct" not in figures.columns
    assert by_rule["fly"]["gap rejected"] == "9.00"
    assert by_rule["exact"]["x exact"] == "-"
    assert list(by_rule)[:2] == ["plain", "exact"]
    assert float(by_rule["exact"]["log p"]) < 0
    html = found.page()
    assert "log p per token, nats" in html
    assert html.count("<svg") == 1


def test_a_task_without_samples_is_named_and_nothing_else() -> None:
    found = report(STUDIES["strict-open"], [STRICT], without="")
    assert [(s.heading, len(s.tables)) for s in found.sections] == [("words", 0)]


def test_claims_about_conditions_without_texts_stay_open() -> None:
    claims = report(STUDIES["window"], [STRICT], without="fly").sections[0].tables[0].rows
    assert {tuple(row[2:]) for row in claims} == {("open", "a condition has no texts yet")}


@pytest.mark.parametrize("tasks", [[STRICT], [OPEN]])
def test_one_kind_of_task_alone_tells_nothing(tasks: list[TaskProblems]) -> None:
    claims = report(STUDIES["strict-open"], tasks).sections[0].tables[0].rows
    assert {row[2] for row in claims} == {"open"}
    assert all("name one with --task" in row[3] for row in claims)
