"""When a rank counts as lost: a pure function of reports and time."""

from __future__ import annotations

from verify_service.rank_watch import Report, Vigil


def vigil(ranks=(1, 2)):
    return Vigil(ranks, heartbeat_timeout_s=4.0, step_timeout_s=10.0)


def test_reports_travel_as_text():
    for report in (Report(0, 0), Report(12, 2**40)):
        assert Report.decode(report.encode().encode()) == report


def test_silence():
    watch = vigil()
    assert watch.observe(1.0, {1: Report(1, 0), 2: Report(1, 0)}) is None
    for beat in range(2, 6):
        reports = {1: Report(beat, 0), 2: Report(1, 0)}
        assert watch.observe(1.0, reports) is None
    assert watch.observe(1.0, reports) == "rank 2 has been silent for 5.0 s"
    assert vigil([0]).observe(5.0, {}) == "rank 0 has been silent for 5.0 s"


def test_a_rank_that_reports_again_is_not_lost():
    watch = vigil([1])
    for beat in range(1, 50):
        assert watch.observe(3.0, {1: Report(beat, 0)}) is None
        assert watch.observe(3.0, {1: Report(beat, 0)}) is None


def test_a_step_that_nobody_finishes():
    watch = vigil([1])
    for beat in range(1, 11):
        assert watch.observe(1.0, {1: Report(beat, 7)}, sent=8) is None
    assert watch.observe(2.0, {1: Report(99, 7)}, sent=9) == (
        "rank 1 has not finished a step for 11.0 s"
    )


def test_idle_and_progress_are_not_stuck():
    watch = vigil([1])
    for beat in range(40):
        assert watch.observe(1.0, {1: Report(beat, 7)}, sent=7) is None
    for beat in range(40, 80):
        assert watch.observe(5.0, {1: Report(beat, beat)}, sent=100) is None
