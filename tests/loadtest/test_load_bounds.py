"""Scenarios with bounds of their own: each bound alone fails a run, and is named."""

from __future__ import annotations

import pytest

from loadtest.figures import PhaseResult
from loadtest.load import Control, LoadPhase, Open
from loadtest.options import LoadOptions
from loadtest.sampler import MemorySample
from loadtest.scenarios import SCENARIOS
from tests.loadtest.load_data import OPTIONS, done, other

LENGTHS = {"before": 10.0, "burst": 30.0, "after": 10.0, "alone": 0.5}


def played(name, requests, grown_mib=0.0):
    """A scenario after phases with these requests, each by its time within its phase."""
    control, results, began = Control(None, str, 0), {}, 0.0
    for phase, of in requests.items():
        seconds = LENGTHS[phase]
        control.records += [make(planned=began + at, phase=phase, **more) for make, at, more in of]
        results[phase] = PhaseResult.of(LoadPhase(phase, Open(1.0), seconds, OPTIONS), began,
                                            began + seconds, control.records)  # fmt: skip
        began += seconds
    scenario = SCENARIOS[name](LoadOptions(), SCENARIOS[name].defaults, control)
    scenario.sampler.memory["verify"] = [
        MemorySample(float(i), i, 500.0 + grown_mib * max(0, i - 10) / 30) for i in range(41)
    ]
    return scenario, results


def made(make, count, **more):
    """So many requests, one after the other, from the beginning of their phase."""
    return [(make, i / count, more) for i in range(count)]


def overload(slow=1.9, refusal=0.1, retry=0.5, probe=1.0, served=True, grown_mib=0.0):
    refused = [(other, 0.5, {"outcome": "refused", "retry_after_s": 1.0})]
    return played("overload", {
        "before": made(done, 20, seconds=1.0),
        "burst": [
            *made(done, 20, seconds=slow),
            *((other, i / 20, {"outcome": "refused", "retry_after_s": retry, "seconds": refusal})
               for i in range(20)),
        ],
        "after": [(done, 0.5, {"seconds": 3.0}), (done, probe, {"seconds": 0.9})]
        if served else refused,
        "alone": [] if served else refused,
    }, grown_mib)  # fmt: skip


def broken(scenario, results):
    """What is said of each check that fails, by name."""
    scenario.judge(results)
    assert len(scenario.checks) > 3
    assert scenario.found
    return {check.name: check.said for check in scenario.checks if not check.passed}


def test_a_run_within_its_bounds_passes():
    assert broken(*overload()) == {}


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"slow": 2.1}, "p99 of accepted requests", "2.10 times that"),
        ({"refusal": 0.6}, "time to a refusal", "600 ms"),
        ({"retry": None}, "refusals", "20 of 20"),
        ({"probe": 6.0}, "normal latency", "after 6.0 s"),
        ({"grown_mib": 60.0}, "memory of verify", "bound +5%"),
    ],
)
def test_each_bound_alone_fails_a_run(change, name, said):
    ((found, text),) = broken(*overload(**change)).items()
    assert found == name
    assert said in text


def test_a_server_that_serves_nobody_any_more_is_told():
    assert set(broken(*overload(served=False))) == {"after", "normal latency"}
