"""A broken bound of `python -m bench.overload` is reported, and the run fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.overload_report import OverloadPhase, OverloadReport, summary
from loadtest.sampler import Memory

CALM = OverloadPhase("80 %", 60.0, 8.0, 480, 480, 0, 0, 500.0, 0.5, 1.0, 0.0, 0.0, 0, 0.01, 0.1)
OVERLOAD = replace(CALM, name="overload", refused=400, completed=80, latency_p99_s=1.9)


def report(overload: OverloadPhase = OVERLOAD, grown_mib: float = 0.0) -> OverloadReport:
    found = OverloadReport(4, 10.0, 10.0, [CALM, overload], recovery_s=1.0, left={"verify": 0})
    steady = [500.0] * 40 + [500.0 + grown_mib] * 20
    found.memory = [Memory(float(i), "verify", mib) for i, mib in enumerate(steady)]
    return found


def test_a_run_within_its_bounds_has_passed():
    assert report().broken() == []
    assert report().to_document()["passed"] is True
    assert "PASSED" in summary(report())


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (report(replace(OVERLOAD, latency_p99_s=2.1)), "p99 of accepted requests is 2.10 times"),
        (report(replace(OVERLOAD, refusal_p99_s=0.6)), "refusals take 0.600 s"),
        (report(replace(OVERLOAD, refusals_without_retry=1)), "1 refusals do not say when"),
        (report(replace(OVERLOAD, late_p99_s=0.2)), "the generator is late by 0.200 s"),
        (report(grown_mib=50.0), "memory of verify grew by 10.0%"),
        (replace(report(), recovery_s=6.0), "normal latency is back after 6.0 s"),
        (replace(report(), left={"verify": 1}), "left at the end: {'verify': 1}"),
        (replace(report(), errors={"INTERNAL": 2}), "requests failed: {'INTERNAL': 2}"),
    ],
)
def test_each_bound_alone_fails_a_run(broken: OverloadReport, why: str):
    assert len(broken.broken()) == 1
    assert broken.broken()[0].startswith(why)
    assert broken.to_document()["passed"] is False
    assert "BROKEN" in summary(broken)
    assert "PASSED" not in summary(broken)
