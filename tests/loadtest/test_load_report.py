"""The report of recorded data: tables, the plot, checks."""

from __future__ import annotations

import math
from dataclasses import replace

from loadtest.figures import Check, number
from loadtest.report import checked, curves, phase_table
from tests.loadtest.load_data import ramp


def test_the_table_has_a_row_for_each_phase():
    results = ramp()
    table = phase_table(results)
    assert len(table.rows) == len(results)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[0][:4] == ["1 users, fly", "1 user", *table.rows[0][2:4]]


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


def test_figures_are_written_for_people():
    written = [number(v) for v in (math.nan, 0.123, 12.34, 1234.5)]
    assert written == ["–", "0.12", "12.3", "1,234"]
