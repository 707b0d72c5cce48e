"""How things stand, as metrics: admission, the drafters, the services.

Read when Prometheus asks, and from where `AdminService` reads it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from flyspec.telemetry.metrics import counter, gauge
from flyspec.values.admin import BreakerState, DrafterState
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.front.admission import Admission

SERVICES = ("verify", "draft")
AT = ("service", "address")
_DRAFTER_COUNTERS = (
    ("generations", "Generations that were given to a drafter.", "generations_total", 1.0),
    (
        "failures",
        "Proposals that a drafter did not make: lost, too late, nonsense.",
        "failures_total",
        1.0,
    ),
    (
        "emitted_tokens",
        "Tokens that came of rounds that a drafter drafted for.",
        "num_emitted_tokens",
        1.0,
    ),
    ("round_seconds", "Time of those rounds.", "round_ns_total", 1e-9),
    ("proposal_seconds", "Time that generations waited for proposals.", "proposal_ns_total", 1e-9),
)


def admission_metrics(admission: Admission) -> Iterator[Metric]:
    """Who runs, who waits, who was refused."""
    yield gauge("flyspec_generations_active", "Generations that run.", admission.active)
    yield gauge("flyspec_generations_waiting", "Generations that wait.", admission.waiting)
    yield gauge("flyspec_generation_slots", "Generations that may run at once.", admission.slots)
    yield gauge(
        "flyspec_outstanding_tokens",
        "Tokens that the generations that run may still read and write.",
        admission.outstanding_tokens,
    )
    yield gauge("flyspec_draining", "1 while nothing new is let in.", admission.draining)
    yield counter(
        "flyspec_requests_refused",
        "Requests that were not let in, by reason.",
        (((reason,), count) for reason, count in admission.refusals.items()),
        "reason",
    )


def fleet_metrics(fleet: Fleet) -> Iterator[Metric]:
    """The drafters, and the replicas of all services."""
    drafters = fleet.drafters.all
    yield from _drafter_metrics(drafters)
    pools: list[tuple[str, Pool[Any]]] = [("verify", fleet.targets)]
    pools += [("draft", drafter.pool) for drafter in drafters if drafter.pool is not None]
    yield from _replica_metrics({(s, r.address): r for s, pool in pools for r in pool.replicas})


def _drafter_metrics(drafters: list[RegisteredDrafter]) -> Iterator[Metric]:
    for name, documentation, attribute, factor in _DRAFTER_COUNTERS:
        totals = (((d.name,), getattr(d.stats, attribute) * factor) for d in drafters)
        yield counter(f"flyspec_drafter_{name}", documentation, totals, "drafter")
    yield gauge(
        "flyspec_drafter_usable",
        "1 if a generation can draft with it now.",
        (((d.name,), d.usable) for d in drafters),
        "drafter",
    )
    left = max(0.0, 1 - sum(d.share for d in drafters if d.state is DrafterState.CANARY))
    yield gauge(
        "flyspec_drafter_share",
        "Share of the new generations that name no drafter, as the operator set it.",
        (((d.name,), left if d.state is DrafterState.ACTIVE else d.share) for d in drafters),
        "drafter",
    )
    yield gauge(
        "flyspec_drafter_state",
        "1 for the state that it is in.",
        (((d.name, s.name.lower()), d.state is s) for d in drafters for s in DrafterState),
        "drafter",
        "state",
    )
    yield gauge(
        "flyspec_drafter_generations_active",
        "Generations that draft with it now.",
        (((d.name,), len(d.users)) for d in drafters),
        "drafter",
    )


def _replica_metrics(replicas: dict[tuple[str, str], Replica[Any]]) -> Iterator[Metric]:
    """Of replicas by their service and address."""
    usable = Counter(service for (service, _), replica in replicas.items() if replica.usable)
    known = Counter(service for service, _ in replicas)
    yield gauge(
        "flyspec_upstream_replicas",
        "Replicas that are known of a service.",
        (((service,), known[service]) for service in SERVICES),
        "service",
    )
    yield gauge(
        "flyspec_upstream_replicas_usable",
        "Replicas that a session may be opened on now.",
        (((service,), usable[service]) for service in SERVICES),
        "service",
    )
    yield gauge(
        "flyspec_upstream_breaker_state",
        "1 for the state of a replica's circuit breaker.",
        (
            ((*at, state.name.lower()), replica.breaker.state is state)
            for at, replica in replicas.items()
            for state in BreakerState
        ),
        *AT,
        "state",
    )
    yield gauge(
        "flyspec_upstream_sessions",
        "Sessions of this orchestrator on a replica.",
        ((at, len(replica.sessions)) for at, replica in replicas.items()),
        *AT,
    )
    yield gauge(
        "flyspec_upstream_outstanding_tokens",
        "Tokens that those sessions may still read and write.",
        ((at, replica.outstanding) for at, replica in replicas.items()),
        *AT,
    )
