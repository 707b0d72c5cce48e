"""Recorded requests and results of phases, without a server."""

from __future__ import annotations

import random

from flyspec.client import GenerateOptions
from loadtest.figures import PhaseResult
from loadtest.load import Closed, LoadPhase, Record

OPTIONS = GenerateOptions()


def done(planned=0.0, seconds=1.0, tokens=11, first=0.2, **more):
    """A completed request with this duration."""
    times = {"planned": planned, "sent": planned, "first": planned + first,
             "ended": planned + seconds}  # fmt: skip
    return Record(**{"phase": "p", "outcome": "complete", "tokens": tokens, "rounds": 2, **times,
                     **more})  # fmt: skip


def other(outcome, planned=0.0, seconds=0.1, **more):
    """A request that was not completed."""
    return Record(**{"phase": "p", "planned": planned, "sent": planned,
                     "ended": planned + seconds, "outcome": outcome, **more})  # fmt: skip


def ramp(users=(1, 4, 16), refused=1):
    """Results of that many steps of two series; latency grows with the users."""
    rng, began, results = random.Random(0), 0.0, []
    for step in users:
        for index, name in enumerate(("fly", "K = 0")):
            phase = LoadPhase(f"{step} users, {name}", Closed(step), 5.0, OPTIONS, series=name)
            records = [other("refused", began, phase=phase.name, retry_after_s=0.5)] * refused
            for _ in range(step):
                at = began
                while at < began + 5.0:
                    seconds = (0.2 + 0.05 * step * (1 + index)) * rng.uniform(0.8, 1.4)
                    records.append(done(at, seconds, first=0.3 * seconds, phase=phase.name))
                    at += seconds
            results.append(PhaseResult.of(phase, began, began + 5.0, records, {"e2e": 900.0}))
            began += 6.0
    return results
