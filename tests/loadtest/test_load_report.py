"""The report of recorded data: page, plots, tables, JSON."""

from __future__ import annotations

import json
import math
import re

import pytest
from typer.testing import CliRunner

from flyspec.cli.program import single
from flyspec.errors import ConfigError
from flyspec_lab.report import PageResults, markdown
from loadtest.measures import duration, number
from loadtest.report import load_report, plots, read, render, tables, write_records
from tests.loadtest.load_data import document


def test_the_page_is_one_file_with_every_plot():
    found = document()
    page = load_report(found).page()
    assert page.count("<svg") == len(plots(found)) == 2
    loaded = re.findall(r'(?:src|href)="([^#][^"]*)"', page)
    assert loaded == []
    for text in (
        "of a &lt;test&gt;", "PASSED", "knee", "16 users, K = 0",
        "warning: the generator was late", "target (bfloat16, cpu) over grpc",
    ):  # fmt: skip
        assert text in page, text


def test_what_the_protocol_does_not_say_is_left_out():
    found = document()
    found["server"], found["options"]["protocol"] = {"target": "target"}, "http"
    assert load_report(found).subtitle.endswith("target over http")


def test_a_broken_check_is_seen_at_once():
    page = load_report(document(users=(2,), failures=2)).page()
    assert '<span class="failed">' in page
    assert "BROKEN failures: 2 failed" in page


def test_a_test_without_curves_shows_what_happened_over_time():
    assert [p.name for p in plots(document("soak", series=("",), users=(4,)))] == ["over-time"]
    assert [p.name for p in plots(document())] == ["curves", "over-time"]


def test_json_is_short_and_can_be_read_again(tmp_path):
    found = document()
    found["found"] = {"nothing": math.nan, "long": 1 / 3, "big": 1234567.8}
    file = tmp_path / "load.json"
    PageResults(output=file).write(load_report(found))
    again = read(file)
    assert again["found"] == {"nothing": None, "long": 0.33333, "big": 1234568}
    assert file.stat().st_size < 60_000
    assert load_report(again).page().count("<svg") == 2
    assert [p["name"] for p in again["phases"]] == [p["name"] for p in found["phases"]]
    page, plot = tmp_path / "a.html", tmp_path / "a.svg"
    arguments = [file, "--html", page, "--plot", plot, "--markdown"]
    ended = CliRunner().invoke(single(render), list(map(str, arguments)))
    assert ended.output == f"{markdown(tables(again))}\n"
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert (tmp_path / "a.html").stat().st_size > 20_000
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        read(tmp_path / "other.json")


def test_records_are_written(tmp_path):
    write_records(tmp_path / "r.jsonl.gz", [{}, {}])
    write_records(tmp_path / "r.jsonl", [{}, {}])
    assert (tmp_path / "r.jsonl").read_text() == "{}\n{}\n"
    assert (tmp_path / "r.jsonl.gz").stat().st_size < 60


def test_the_table_shows_what_there_is(capsys):
    found = document()
    (phases,) = tables(found)
    assert len(phases.rows) == len(found["phases"]) * 3
    assert "goodput" in phases.columns
    assert all(len(row) == len(phases.columns) for row in phases.rows)
    assert PageResults().finish(load_report(found)) == 0
    printed = capsys.readouterr().out
    assert "PASSED" in printed
    assert "16 users, fly" in printed
    assert "…" not in printed


def test_a_column_that_says_nothing_is_left_out():
    found = document()
    for phase in found["phases"]:
        for figures in (phase, *phase["by_variant"].values()):
            figures["cancelled"], figures["goodput"] = 0, None
    columns = tables(found)[0].columns
    assert "given up" not in columns
    assert "goodput" not in columns
    assert "refused" in columns


def test_a_scenarios_records_become_a_table(capsys):
    found = document()
    found["found"] = {"turns": [{"drafter": "b", "drain_ms": 80.25, "left": 0}], "curves": {}}
    found["lines"] = ["1 swap moved 0 generations"]
    _, turns = tables(found)
    assert (turns.title, turns.columns) == ("turns", ["drafter", "drain ms", "left"])
    assert turns.rows == [["b", "80.2", "0"]]
    load_report(found).show()
    assert "1 swap moved 0 generations" in capsys.readouterr().out


def test_the_end_of_a_measurement_is_an_exit_code(capsys):
    assert PageResults(json=True).finish(load_report(document())) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert PageResults().finish(load_report(document(users=(2,), failures=2))) == 1
    assert "FAILED" in capsys.readouterr().out


def test_figures_are_written_for_people():
    assert [number(v) for v in (None, math.nan, 0.123, 12.34, 1234.5)] == [
        "–", "–", "0.12", "12.3", "1,234"
    ]  # fmt: skip
    assert [duration(v) for v in (None, 9.87, 123.4, 1234.0, 123456.0)] == [
        "–", "9.9 ms", "123 ms", "1.23 s", "123 s"
    ]  # fmt: skip
