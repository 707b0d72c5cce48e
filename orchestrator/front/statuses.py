"""Statuses of drafters and replicas for operators, in plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flyspec.values.admin import DrafterStatus, HeadInfo, ModelInfo, UpstreamStatus
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.handshake import is_foreign
from orchestrator.fleet.heads import head_of
from orchestrator.fleet.replicas import Replica


def drafter_status(drafter: RegisteredDrafter, target: ModelInfo) -> DrafterStatus:
    """Return a drafter's status; a head's replicas are those of the target that have it."""
    model = drafter.model
    replicas: list[Replica[Any]] = [*drafter.replicas]
    if (head := drafter.head) is not None and drafter.pool is None:
        replicas = [r for r in head.targets.replicas if head_of(r, head.name)]
        model = _head_model(drafter.name, head.info, target)
    return DrafterStatus(
        name=drafter.name,
        kind=drafter.kind,
        usable=drafter.usable,
        reason=drafter.reason,
        model=model,
        state=drafter.state,
        share=drafter.share,
        translated=is_foreign(model, target),
        replicas=[replica_status(replica) for replica in replicas],
        stats=replace(drafter.stats, active_generations=len(drafter.users)),
    )


def _head_model(name: str, info: HeadInfo | None, target: ModelInfo) -> ModelInfo | None:
    """Describe a head like a draft model: it has the target's tokenizer and context."""
    if info is None:
        return None
    return replace(
        target,
        name=name,
        num_parameters=info.num_parameters,
        weights_fingerprint=info.fingerprint,
    )


def replica_status(replica: Replica[Any]) -> UpstreamStatus:
    status = UpstreamStatus(
        address=replica.address,
        ready=replica.usable,
        error=replica.reason,
        breaker=replica.breaker.state,
        active_generations=len(replica.sessions),
        faults_total=replica.faults_total,
        last_fault=replica.last_fault,
    )
    if (info := replica.info) is None:
        return status
    model = info.model if hasattr(info, "model") else info.drafters[0].model
    return replace(status, sessions=info.sessions, process=info.process, model=model)
