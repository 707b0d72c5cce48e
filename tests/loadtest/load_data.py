"""Recorded requests and a document made of them, without a server."""

from __future__ import annotations

import random

from flyspec.client import GenerateOptions
from loadtest.record import Record
from loadtest.report import VERSION
from loadtest.summary import PhaseResult, timeline
from loadtest.work import Closed, LoadPhase, Variant

VARIANT = Variant("fly, K = 15", GenerateOptions())
PLAIN = Variant("K = 0", GenerateOptions())


def done(planned=0.0, seconds=1.0, tokens=11, first=0.2, **more):
    """A completed request with this duration."""
    times = {"planned": planned, "sent": planned, "first": planned + first,
             "ended": planned + seconds}  # fmt: skip
    return Record(**{"phase": "p", "variant": VARIANT.name, "outcome": "complete",
                     "tokens": tokens, "rounds": 2, **times, **more})  # fmt: skip


def other(outcome, planned=0.0, seconds=0.1, **more):
    """A request that was not completed."""
    return Record(**{"phase": "p", "variant": VARIANT.name, "planned": planned, "sent": planned,
                     "ended": planned + seconds, "outcome": outcome, **more})  # fmt: skip


def document(scenario="ramp", series=("fly", "K = 0"), users=(1, 4, 16), failures=0):
    """The document of a test with that many steps per series; latency grows with the users."""
    rng, began, results, records = random.Random(0), 0.0, [], []
    for step in users:
        for index, name in enumerate(series):
            phase = LoadPhase(
                f"{step} users, {name}", Closed(step), 5.0, (VARIANT, PLAIN), series=name
            )
            of_phase = []
            for user in range(step):
                at = began
                while at < began + 5.0:
                    seconds = (0.2 + 0.05 * step * (1 + index)) * rng.uniform(0.8, 1.4)
                    of_phase.append(done(at, seconds, first=0.3 * seconds, phase=phase.name,
                                         variant=(VARIANT, PLAIN)[user % 2].name))  # fmt: skip
                    at += seconds
            of_phase += [other("refused", began + 1.0, phase=phase.name, retry_after_s=0.5)]
            of_phase += [other("cancelled", began + 1.0, phase=phase.name)]
            of_phase += [other("failed", began, phase=phase.name, error="x")] * failures
            results.append(PhaseResult.of(phase, began, began + 5.0, 0.1, of_phase, {"e2e": 900.0}))
            records += of_phase
            began += 6.0
    return {
        "version": VERSION,
        "scenario": scenario,
        "about": "of a <test>",
        "passed": not failures,
        "begun": "2026-01-01 00:00 UTC",
        "seconds": began,
        "server": {"target": "target", "dtype": "bfloat16", "device": "cpu",
                   "num_parameters": 12, "drafters": ["model"]},
        "generator": {"cores": 2, "python": "3.11"},
        "options": {"seconds": 30},
        "found": {},
        "lines": [],
        "checks": [{"name": "failures", "passed": not failures, "said": f"{failures} failed"}],
        "warnings": ["the generator was late"],
        "phases": [r.to_document() for r in results],
        "errors": {"x": failures} if failures else {},
        "events": [{"seconds": 7.0, "text": "b is active"}],
        "memory": {"verify": {"seconds": [0.0, 20.0], "mib": [900.0, 910.0]}},
        "status": {"seconds": [0.0, 20.0], "active": [1, 4], "waiting": [0, 1],
                   "target_sessions": [1, 4]},
        "timeline": timeline(records, began),
    }  # fmt: skip
