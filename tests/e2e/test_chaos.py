"""Every stream survives whatever happens to the services, and the suite would notice otherwise."""

from __future__ import annotations

import pytest

from flyspec_lab.report import Results
from loadtest.chaos.__main__ import ChaosOptions, disturb
from loadtest.chaos.faults import FAULTS, OUTER


async def check(options, faults):
    report = await disturb(options)
    assert Results().finish(report) == 0
    found = report.document
    assert min(found["complete"].values()) > 0
    assert {kind for kind, n in found["faults"].items() if sum(n)} == {f.name for f in faults}
    return found["recoveries"]


@pytest.mark.timeout(900)
@pytest.mark.slow
async def test_one_fault_of_each_kind_from_outside():
    options = ChaosOptions(seed=5, seconds=0, streams=4, texts=6, lossy_share=0.4)
    assert len(await check(options, OUTER)) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_five_minutes_of_random_faults():
    recoveries = await check(ChaosOptions(seed=5), FAULTS)
    assert {"target reopened", "drafter fallback", "drafter restored"} <= set(recoveries)
