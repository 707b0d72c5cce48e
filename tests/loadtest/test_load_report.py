"""The report of recorded data: tables, the plot, checks."""

from __future__ import annotations

import math
from dataclasses import replace

from loadtest.figures import Check, number
from loadtest.report import checked, curves, found_tables, phase_table
from tests.loadtest.load_data import ramp


def test_the_table_has_a_row_for_each_phase():
    results = ramp()
    table = phase_table(results)
    assert len(table.rows) == len(results)
    assert {"goodput", "refused"} <= set(table.columns)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[0][:4] == ["1 users, fly", "1 user", *table.rows[0][2:4]]


def test_a_column_that_says_nothing_is_left_out():
    results = [replace(result, judged=False) for result in ramp(refused=0)]
    columns = phase_table(results).columns
    assert not {"refused", "given up"} & set(columns)
    assert "goodput" in columns


def test_a_ramp_is_drawn_with_its_knees_and_nothing_else_is():
    (plot,) = curves(ramp())
    assert "knee" in plot.svg
    assert "fly, p50" in plot.svg
    assert curves([replace(result, series="") for result in ramp()]) == []


def test_a_broken_check_fails_a_run(capsys):
    held = Check("rules", True, "all")
    assert checked([held], [], {}).passed
    report = checked([held, Check("failures", False, "2 failed")], ["told"], {"seed": 1})
    assert not report.passed
    assert report.document["passed"] is False
    report.show()
    printed = capsys.readouterr().out
    for text in ("told", "ok     rules: all", "BROKEN failures: 2 failed", "FAILED"):
        assert text in printed


def test_a_scenarios_records_become_a_table():
    (curves,) = found_tables({
        "curves": [{"series": "fly", "most_tokens_per_s": 80.25}], "ratio": 2.0, "none": [],
    })  # fmt: skip
    assert curves.columns == ["series", "most tokens per s"]
    assert curves.rows == [["fly", "80.2"]]


def test_figures_are_written_for_people():
    written = [number(v) for v in (math.nan, 0.123, 12.34, 1234.5)]
    assert written == ["–", "0.12", "12.3", "1,234"]
