"""Scenarios with bounds of their own: each bound alone fails a run, and is named."""

from __future__ import annotations

import pytest

from loadtest.options import LoadOptions
from loadtest.sampler import ProcessMemory, Sampler
from loadtest.scenarios import SCENARIOS, World
from loadtest.summary import PhaseResult
from loadtest.work import LoadPhase, Open
from tests.loadtest.load_data import VARIANT, done, other

LENGTHS = {"before": 10.0, "burst": 30.0, "after": 10.0, "one": 10.0, "several": 10.0}


def played(name, requests, grown_mib=0.0):
    """A scenario after phases with these requests, each by its time within its phase."""
    records, results, began = [], {}, 0.0
    for phase, of in requests.items():
        seconds = LENGTHS[phase]
        mine = [make(planned=began + at, phase=phase, **more) for make, at, more in of]
        results[phase] = PhaseResult.of(LoadPhase(phase, Open(1.0), seconds, (VARIANT,)), began,
                                            began + seconds, 0.1, mine)  # fmt: skip
        records += mine
        began += seconds
    sampler = Sampler({}, None, lambda: 0.0, lambda: 0, print)
    sampler.memory = [
        ProcessMemory(float(i), i, "verify", 0, 500.0 + grown_mib * max(0, i - 10) / 30)
        for i in range(41)
    ]
    world = World(sampler, records=records)
    scenario = SCENARIOS[name](LoadOptions(), SCENARIOS[name].defaults, world)
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


def sharing(first=0.25, retry=0.5, refused=4, started=(0.1, 0.2)):
    return played("sharing", {
        "one": made(done, 20, first=0.2),
        "several": [
            *made(done, 20, first=first),
            *((done, at, {"started": 30.0 + slot}) for at, slot in zip((0.0, 2.0), started,
                                                                      strict=True)),
            *made(other, refused, outcome="refused", retry_after_s=retry),
        ],
    })  # fmt: skip


@pytest.mark.parametrize("make", [overload, sharing])
def test_a_run_within_its_bounds_passes(make):
    scenario, results = make()
    verdict = scenario.judge(results)
    assert len(verdict.checks) > 3
    assert [c for c in verdict.checks if not c.passed] == []
    assert verdict.found


@pytest.mark.parametrize(
    ("make", "change", "name", "said"),
    [
        (overload, {"slow": 2.1}, "p99 of accepted requests", "2.10 times that"),
        (overload, {"refusal": 0.6}, "time to a refusal", "600 ms"),
        (overload, {"retry": None}, "refusals", "20 of 20"),
        (overload, {"late": 0.2}, "generator", "200 ms late"),
        (overload, {"probe": 6.0}, "normal latency", "after 6.0 s"),
        (overload, {"grown_mib": 60.0}, "memory of verify", "bound +5%"),
        (sharing, {"first": 0.31}, "p99 TTFT", "1.55 times"),
        (sharing, {"started": (0.3, 0.2)}, "order", "up to 2.00 s later"),
        (sharing, {"refused": 0}, "load", "0 requests were refused"),
        (sharing, {"retry": None}, "refusals", "4 of 4"),
    ],
)
def test_each_bound_alone_fails_a_run(make, change, name, said):
    scenario, results = make(**change)
    (broken,) = [c for c in scenario.judge(results).checks if not c.passed]
    assert broken.name == name
    assert said in broken.said
