"""Metrics of the current state of admission, drafters and services.

Computed when Prometheus scrapes them, from the same sources as `AdminService`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from flyspec.telemetry.metrics import gauge
from flyspec.values.admin import BreakerState, DrafterState
from orchestrator.admission.admission import REFUSALS, Admission
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.replicas import Pool
from orchestrator.upstreams.proposal_checks import DraftFault

_DRAFTER_COUNTERS = (
    ("generations", "Generations assigned to a drafter.", "generations_total", 1.0),
    ("failures", "Proposals that failed: lost, too late or invalid.", "failures_total", 1.0),
    ("emitted_tokens", "Tokens emitted in rounds of a drafter.", "num_emitted_tokens", 1.0),
    ("round_seconds", "Total time of these rounds.", "round_ns_total", 1e-9),
)


def admission_metrics(admission: Admission) -> Iterator[Metric]:
    yield gauge("flyspec_generations_active", "Running generations.", admission.active)
    yield gauge("flyspec_generations_waiting", "Waiting generations.", admission.waiting)
    yield gauge("flyspec_generation_slots", "Generations that may run at once.", admission.slots)
    yield gauge(
        "flyspec_outstanding_tokens",
        "Prompt and output tokens that running generations may still process.",
        admission.outstanding_tokens,
    )
    yield gauge("flyspec_draining", "1 while no new requests are accepted.", admission.draining)
    refusals = CounterMetricFamily(
        "flyspec_requests_refused", "Refused requests, by reason.", labels=["reason"]
    )
    for reason in REFUSALS:
        refusals.add_metric([reason], admission.refusals[reason])
    yield refusals


def fleet_metrics(fleet: Fleet) -> Iterator[Metric]:
    yield from _drafter_metrics(fleet.drafters.all)
    yield from _replica_metrics({"verify": [fleet.targets], "draft": fleet.drafters.pools})


def _drafter_metrics(drafters: list[RegisteredDrafter]) -> Iterator[Metric]:
    for name, documentation, attribute, factor in _DRAFTER_COUNTERS:
        total = CounterMetricFamily(f"flyspec_drafter_{name}", documentation, labels=["drafter"])
        for drafter in drafters:
            total.add_metric([drafter.name], getattr(drafter.stats, attribute) * factor)
        yield total
    proposals = HistogramMetricFamily(
        "flyspec_drafter_proposal_seconds",
        "Time from requesting a proposal to its arrival; of a head of the target, its own time.",
        labels=["drafter"],
    )
    for drafter in drafters:
        drafter.proposal_seconds.add_to(proposals, [drafter.name])
    yield proposals
    faults = CounterMetricFamily(
        "flyspec_drafter_faults",
        "Invalid messages from a drafter, by kind of fault.",
        labels=["drafter", "fault"],
    )
    for drafter in drafters:
        for fault in DraftFault if drafter.pool or drafter.head else ():
            faults.add_metric([drafter.name, fault], drafter.faults[fault])
    yield faults
    family = partial(_gauge, "drafter", labels=("drafter",))
    usable = family("usable", "1 if generations can currently use the drafter.")
    share = family(
        "share", "Share of new generations without a named drafter that go to this drafter."
    )
    states = family("state", "1 for the drafter's current state.", "state")
    active = family("generations_active", "Generations currently using the drafter.")
    canaries = sum(d.share for d in drafters if d.state is DrafterState.CANARY)
    for drafter in drafters:
        usable.add_metric([drafter.name], drafter.usable)
        is_default = drafter.state is DrafterState.ACTIVE
        share.add_metric([drafter.name], max(0.0, 1 - canaries) if is_default else drafter.share)
        active.add_metric([drafter.name], len(drafter.users))
        for state in DrafterState:
            states.add_metric([drafter.name, state.name.lower()], drafter.state is state)
    yield from (usable, share, states, active)


def _replica_metrics(services: Mapping[str, Sequence[Pool[Any]]]) -> Iterator[Metric]:
    family = partial(_gauge, "upstream", labels=("service",))
    replicas = family("replicas", "Known replicas of a service.")
    usable = family("replicas_usable", "Replicas that currently accept new sessions.")
    family = partial(_gauge, "upstream", labels=("service", "address"))
    breakers = family("breaker_state", "1 for the state of a replica's circuit breaker.", "state")
    misfits = family("misfit", "1 for a healthy replica that does not match the others.")
    sessions = family("sessions", "This orchestrator's sessions on a replica.")
    tokens = family("outstanding_tokens", "Tokens these sessions may still process.")
    for service, pools in services.items():
        found = {r.address: r for pool in pools for r in pool.replicas}
        replicas.add_metric([service], len(found))
        usable.add_metric([service], sum(r.usable for r in found.values()))
        for address, replica in found.items():
            for state in BreakerState:
                breakers.add_metric(
                    [service, address, state.name.lower()], replica.breaker.state is state
                )
            misfits.add_metric([service, address], bool(replica.misfit))
            sessions.add_metric([service, address], len(replica.sessions))
            tokens.add_metric([service, address], replica.outstanding)
    yield from (replicas, usable, breakers, misfits, sessions, tokens)


def _gauge(
    of: str, name: str, documentation: str, *more: str, labels: Sequence[str]
) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"flyspec_{of}_{name}", documentation, labels=(*labels, *more))
