"""Every stream survives whatever happens to the services, and the suite would notice otherwise."""

from __future__ import annotations

import pytest

from flyspec_lab.report import Results
from loadtest.chaos.__main__ import ChaosOptions, disturb, report
from loadtest.chaos.faults import FAULTS, OUTER


async def check(options, faults):
    done = await disturb(options, print)
    found = report(done, print)
    assert Results().finish(found) == 0
    assert {request.lossy for request in done.requests if request.generation} == {False, True}
    assert {kind for kind, _ in done.faults} == {fault.name for fault in faults}
    return found.document["recoveries"]


@pytest.mark.timeout(900)
async def test_one_fault_of_each_kind_from_outside():
    options = ChaosOptions(seed=5, seconds=0, streams=4, texts=6, lossy_share=0.4)
    assert len(await check(options, OUTER)) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_five_minutes_of_random_faults():
    recoveries = await check(ChaosOptions(seed=5), FAULTS)
    assert {"target reopened", "drafter fallback", "drafter restored"} <= set(recoveries)
