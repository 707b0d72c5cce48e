"""The report of recorded data: page, plots, table, JSON."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest
from loadtest.report.files import LabResults, read, write_records
from loadtest.report.load import LoadReport
from loadtest.report.page import page

from flyspec.errors import ConfigError
from loadtest.measures import duration, number
from tests.loadtest.load_data import document

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Records open tags and external resources."""

    def __init__(self):
        super().__init__()
        self.open, self.counts, self.loaded, self.text = [], {}, [], ""

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(found):
    reader = Page()
    reader.feed(page(LoadReport(found)))
    assert reader.open == []
    return reader


def test_the_page_is_one_file_with_every_plot():
    found = document()
    reader = parsed(found)
    assert reader.counts["svg"] == len(LoadReport(found).plots()) == 4
    assert reader.loaded == []
    for text in ("of a <test>", "passed", "knee", "16 users, K = 0", "the generator was late"):
        assert text in reader.text


def test_what_the_protocol_does_not_say_is_left_out():
    found = document()
    assert LoadReport(found).about[1].endswith("target (bfloat16, cpu) over grpc")
    found["server"], found["options"]["protocol"] = {"target": "target"}, "http"
    assert LoadReport(found).about[1].endswith("target over http")
    assert "target over http" in parsed(found).text


def test_a_broken_check_is_seen_at_once():
    text = parsed(document(users=(2,), failures=2)).text
    assert "failed" in text
    assert "broken" in text


def test_a_test_without_curves_begins_with_what_happened_over_time():
    found = document("soak", series=("",), users=(4,))
    assert [p.title for p in LoadReport(found).plots()] == [
        "Ways of asking, side by side", "How long requests take", "Over time"
    ]  # fmt: skip
    for phase in found["phases"]:
        phase["by_variant"] = {}
    assert [p.title for p in LoadReport(found).plots()] == ["Over time", "How long requests take"]


def test_json_is_short_and_can_be_read_again(tmp_path):
    found = document()
    found["found"] = {"nothing": math.nan, "long": 1 / 3, "big": 1234567.8}
    file = tmp_path / "load.json"
    LabResults(output=file).write(LoadReport(found))
    again = read(file)
    assert again["found"] == {"nothing": None, "long": 0.33333, "big": 1234568}
    assert file.stat().st_size < 60_000
    assert parsed(again).counts["svg"] == 4
    assert [p["name"] for p in again["phases"]] == [p["name"] for p in found["phases"]]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        read(tmp_path / "other.json")


def test_plots_and_records_are_written(tmp_path):
    files = LabResults(html=tmp_path / "a.html", plot=tmp_path / "a.svg")
    files.write(LoadReport(document()))
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert (tmp_path / "a.html").stat().st_size > 20_000
    write_records(tmp_path / "r.jsonl.gz", [{}, {}])
    write_records(tmp_path / "r.jsonl", [{}, {}])
    assert (tmp_path / "r.jsonl").read_text() == "{}\n{}\n"
    assert (tmp_path / "r.jsonl.gz").stat().st_size < 60


def test_the_table_shows_what_there_is(capsys):
    found = document()
    (phases,) = LoadReport(found).tables()
    assert len(phases.rows) == len(found["phases"]) * 3
    assert "goodput" in phases.columns
    assert all(len(row) == len(phases.columns) for row in phases.rows)
    LabResults().finish(LoadReport(found))
    printed = capsys.readouterr().out
    assert "PASSED" in printed
    assert "16 users, fly" in printed
    assert "…" not in printed


def test_the_same_table_for_a_document():
    found = LoadReport(document())
    lines = found.markdown().splitlines()
    assert lines[0].startswith("| phase | load |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(found.tables()[0].rows)


def test_a_column_that_says_nothing_is_left_out():
    found = document()
    for phase in found["phases"]:
        for figures in (phase, *phase["by_variant"].values()):
            figures["cancelled"], figures["goodput"] = 0, None
    columns = LoadReport(found).tables()[0].columns
    assert "given up" not in columns
    assert "goodput" not in columns
    assert "refused" in columns


def test_a_scenarios_records_become_a_table():
    found = document()
    found["found"] = {"turns": [{"drafter": "b", "drain_ms": 80.25, "left": 0}], "curves": {}}
    found["lines"] = ["1 swap moved 0 generations"]
    report = LoadReport(found)
    _, turns = report.tables()
    assert (turns.title, turns.columns) == ("Turns", ["drafter", "drain ms", "left"])
    assert turns.rows == [["b", "80.2", "0"]]
    assert "1 swap moved 0 generations" in parsed(found).text


def test_the_end_of_a_measurement_is_an_exit_code(tmp_path, capsys):
    assert LabResults(json=True).finish(LoadReport(document())) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert LabResults().finish(LoadReport(document(users=(2,), failures=2))) == 1
    assert "FAILED" in capsys.readouterr().out


def test_figures_are_written_for_people():
    assert [number(v) for v in (None, math.nan, 0.123, 12.34, 1234.5)] == [
        "–", "–", "0.12", "12.3", "1,234"
    ]  # fmt: skip
    assert [duration(v) for v in (None, 9.87, 123.4, 1234.0, 123456.0)] == [
        "–", "9.9 ms", "123 ms", "1.23 s", "123 s"
    ]  # fmt: skip
