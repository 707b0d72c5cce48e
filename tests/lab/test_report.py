"""A report: its page, its JSON, and what a terminal shows."""

from __future__ import annotations

import json
import re

from flyspec.tables import make_table
from flyspec_lab.report import Plot, Report, Section


def draw(figure):
    ax = figure.subplots()
    ax.plot([1, 2], [3, 4], label="<b>fly & exact</b>")
    ax.legend()


TABLE = make_table(["rule", "correct"], [["fly<", "98 %"], ["exact", "99 %"]], "A title")
REPORT = Report(
    {"rate": 3.5},
    [
        Section(
            "Results & more",
            ["One `<script>` paragraph."],
            [TABLE],
            [Plot("one", "What `W` does.", draw), Plot("two", "Again.", draw)],
        ),
        "One `<script>` paragraph.",
        "A note.",
    ],
    {"samples": [1, 2]},
    title="W <4> & θ",
    subtitle="Does `W = 0` lose <i>answers</i>?",
    facts={"target": "a <model>"},
)


def test_html_is_whole_and_escaped():
    html = REPORT.page()
    assert html.count("<svg") == 2
    for text in ("W &lt;4&gt; &amp; θ", "lose &lt;i&gt;", "`&lt;script&gt;`", "fly&lt;", "99 %"):
        assert text in html
    fetched = re.findall(r'\b(?:src|href)="([^"]*)"', html)
    assert all(where.startswith("#") for where in fetched)


def test_ids_of_two_plots_differ():
    ids = re.findall(r'\bid="([^"]+)"', REPORT.page())
    assert len(ids) == len(set(ids))


def test_it_is_written_as_data_too(tmp_path):
    assert REPORT.write(tmp_path).read_text() == REPORT.page()
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["rate"], document["samples"]) == (3.5, [1, 2])
    assert document["report"]["title"] == REPORT.title
    section, nothing, note = document["report"]["sections"]
    assert section["tables"] == [
        {
            "title": "A title",
            "columns": ["rule", "correct"],
            "rows": [["fly<", "98 %"], ["exact", "99 %"]],
            "left": 1,
        }
    ]
    assert nothing["paragraphs"] == [], "what was said is not said again"
    assert note["paragraphs"] == ["A note."]
    for plot in section["plots"]:
        assert "<svg" in (tmp_path / f"{plot['name']}.svg").read_text()


def test_a_terminal_gets_tables_and_text(capsys):
    REPORT.show()
    printed = capsys.readouterr().out
    for text in ("Results & more", "fly<", "99 %", "A note.", "<script>"):
        assert printed.count(text) == 1
