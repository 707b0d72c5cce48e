"""A running installation, seen from a client: readiness, models, drafters, replicas."""

from __future__ import annotations

from collections.abc import Iterator

from flyspec.credentials import Credentials
from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.errors import FlyspecError
from flyspec.values.admin import DrafterStatus, UpstreamStatus
from flyspec.values.generation import Models

SECTION = "running installation"
TIMEOUT_S = 5.0


async def running(
    address: str, admin_address: str | None, credentials: Credentials
) -> list[Diagnosis]:
    """Examine the installation at a generation address and, if given, at its admin address."""
    from flyspec.client import AdminClient, AsyncClient

    found = []
    try:
        async with AsyncClient(address, credentials=credentials, max_retries=0) as client:
            client.hint = "pass --address"
            status = await client.check_health(timeout_s=TIMEOUT_S)
            ready = status == "SERVING"
            text = f"{address} is ready" if ready else (
                f"{address} answers but is not ready ({status}): see the orchestrator's log, or "
                "give --admin-address for its state"
            )  # fmt: skip
            found.append(Diagnosis(SECTION, "generation", Mark.OK if ready else Mark.ERROR, text))
            if ready:
                models = await client.list_models(TIMEOUT_S)
                found.append(Diagnosis(SECTION, "model", Mark.OK, _models(models)))
    except FlyspecError as error:
        found.append(Diagnosis(SECTION, "generation", Mark.ERROR, str(error)))
    if admin_address is None:
        return found
    try:
        async with AdminClient(admin_address, credentials) as admin:
            admin.hint = "pass --admin-address"
            state = await admin.status(TIMEOUT_S)
            drafters = await admin.list_drafters(TIMEOUT_S)
    except FlyspecError as error:
        return [*found, Diagnosis(SECTION, "admin", Mark.ERROR, str(error))]
    if state.draining:
        text = "it is draining and refuses requests; AdminService.Drain with resume ends that"
        found.append(Diagnosis(SECTION, "admin", Mark.WARNING, text))
    found += map(_target, state.targets)
    found += [finding for drafter in drafters for finding in _drafter(drafter)]
    return found


def _models(models: Models) -> str:
    target = models.target
    return (
        f"{target.name}, context of {target.context_length:,} tokens; drafters "
        f"{', '.join(models.drafters)}; rules {', '.join(models.rules)}"
    )


def _target(replica: UpstreamStatus) -> Diagnosis:
    sessions = replica.sessions
    if not replica.ready:
        text = f"{replica.address}: {replica.error}"
        return Diagnosis(SECTION, "target", Mark.ERROR, text)
    text = f"{replica.address}: {sessions.active} of {sessions.limit} sessions"
    if model := replica.model:
        text += f", {model.name} on {model.device}, {model.numerics or model.dtype}"
    full = sessions.active >= sessions.limit
    text += "; full: raise --max-sessions or add a replica" if full else ""
    return Diagnosis(SECTION, "target", Mark.WARNING if full else Mark.OK, text)


def _drafter(drafter: DrafterStatus) -> Iterator[Diagnosis]:
    subject = "drafter"
    named = f"{drafter.name} ({drafter.state.name.lower()})"
    if not drafter.usable:
        mark = Mark.ERROR if drafter.active else Mark.WARNING
        yield Diagnosis(SECTION, subject, mark, f"{named} is not usable: {drafter.reason}")
        return
    text = f"{named} is usable"
    if drafter.translated:
        text += ", its tokens are translated"
    if drafter.stats.num_spec_steps:
        text += f", accepted {drafter.stats.draft_acceptance_rate:.0%}"
    yield Diagnosis(SECTION, subject, Mark.OK, text)
    for replica in drafter.replicas:
        if replica.faults_total:
            text = f"{drafter.name} at {replica.address} sent {replica.faults_total} invalid "
            text += f"messages; the last: {replica.last_fault}; check its version and model"
            yield Diagnosis(SECTION, subject, Mark.WARNING, text)
