"""What operators are told of drafters and replicas, in plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flyspec.values.admin import DrafterStatus, ModelInfo, UpstreamStatus
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.handshake import is_foreign
from orchestrator.fleet.replicas import Replica


def drafter_status(drafter: RegisteredDrafter, target: ModelInfo) -> DrafterStatus:
    model = drafter.model
    return DrafterStatus(
        name=drafter.name,
        kind=drafter.kind,
        usable=drafter.usable,
        reason=drafter.reason,
        model=model,
        state=drafter.state,
        share=drafter.share,
        translated=is_foreign(model, target),
        replicas=[replica_status(replica) for replica in drafter.replicas],
        stats=replace(drafter.stats, active_generations=len(drafter.users)),
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
