"""A study's report: everything escaped, nothing fetched, tables and plots in place."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from flyspec.tables import make_table
from flyspec_lab.studies.page import Page, PagePlot, PageSection


def draw(figure):
    ax = figure.subplots()
    ax.plot([1, 2], [3, 4], label="<b>fly & exact</b>")
    ax.legend()


PAGE = Page(
    "W <4> & θ",
    "Does `W = 0` lose <i>answers</i>?",
    "flyspec study window --problems 10 > out && echo",
    {"target": "a <model>"},
    [
        PageSection(
            "Results & more",
            ["One `<script>` paragraph."],
            [make_table(["rule", "correct"], [["fly<", "98 %"], ["exact", "99 %"]], "A title")],
            [PagePlot("one", "What `W` does.", draw), PagePlot("two", "Again.", draw)],
        )
    ],
)


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text of cells."""

    def __init__(self):
        super().__init__()
        self.tags, self.cells, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th") and data.strip():
            self.cells.append(data)


def test_html_is_whole_and_escaped():
    html = PAGE.to_html()
    reader = Reader()
    reader.feed(html)
    names = [tag for tag, _ in reader.tags]
    assert names.count("svg") == 2
    assert "script" not in names
    assert "i" not in names
    assert reader.cells == ["rule", "correct", "fly<", "98 %", "exact", "99 %"]
    assert "<code>W = 0</code>" in html
    assert "<code>&lt;script&gt;</code>" in html
    fetched = [v for _, attrs in reader.tags for k, v in attrs.items() if k in ("src", "href")]
    assert all((v or "").startswith("#") for v in fetched)


def test_ids_of_two_plots_differ():
    ids = re.findall(r'\bid="([^"]+)"', PAGE.to_html())
    assert len(ids) == len(set(ids))


def test_it_is_written_as_data_too(tmp_path):
    assert PAGE.write(tmp_path).read_text() == PAGE.to_html()
    page = json.loads((tmp_path / "page.json").read_text())
    assert page["title"] == PAGE.title
    (section,) = page["sections"]
    assert section["tables"] == [
        {
            "title": "A title",
            "columns": ["rule", "correct"],
            "rows": [["fly<", "98 %"], ["exact", "99 %"]],
            "left": 1,
        }
    ]
    for plot in section["plots"]:
        assert "<svg" in (tmp_path / f"{plot['name']}.svg").read_text()
