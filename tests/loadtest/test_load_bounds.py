"""Scenarios with bounds of their own: each bound alone fails a run, and is named."""

from __future__ import annotations

import pytest

from loadtest.figures import PhaseResult
from loadtest.load import Control, LoadPhase, Open
from loadtest.options import LoadOptions
from loadtest.sampler import MemorySample
from loadtest.scenarios import SCENARIOS
from tests.loadtest.load_data import OPTIONS, done, other

LENGTHS = {"before": 10.0, "burst": 30.0, "after": 10.0}


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


def overload(slow=1.9, refusal=0.1, retry=0.5, late=0.0, probe=1.0, grown_mib=0.0):
    return played("overload", {
        "before": made(done, 20, seconds=1.0),
        "burst": [
            *made(done, 20, seconds=slow),
            *((other, i / 20, {"outcome": "refused", "retry_after_s": retry, "seconds": refusal,
                               "sent": 10.0 + i / 20 + late}) for i in range(20)),
        ],
        "after": [(done, 0.5, {"seconds": 3.0}), (done, probe, {"seconds": 0.9})],
    }, grown_mib)  # fmt: skip


def test_a_run_within_its_bounds_passes():
    scenario, results = overload()
    verdict = scenario.judge(results)
    assert len(verdict.checks) > 3
    assert [c for c in verdict.checks if not c.passed] == []
    assert verdict.found


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"slow": 2.1}, "p99 of accepted requests", "2.10 times that"),
        ({"refusal": 0.6}, "time to a refusal", "600 ms"),
        ({"retry": None}, "refusals", "20 of 20"),
        ({"late": 0.2}, "generator", "200 ms late"),
        ({"probe": 6.0}, "normal latency", "after 6.0 s"),
        ({"grown_mib": 60.0}, "memory of verify", "bound +5%"),
    ],
)
def test_each_bound_alone_fails_a_run(change, name, said):
    scenario, results = overload(**change)
    (broken,) = [c for c in scenario.judge(results).checks if not c.passed]
    assert broken.name == name
    assert said in broken.said
