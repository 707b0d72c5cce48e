"""Planned against free memory, of this machine and of each GPU, before weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.doctor.gpus import gpus
from flyspec.doctor.models import Examined
from flyspec.engine.cache_size import Fit, KVCachePlan, plan_fit, readable
from flyspec.engine.device_memory import DeviceMemory, host_memory
from flyspec.errors import ConfigError

SECTION = "memory"


class Fitted(NamedTuple):
    """Device memory that a model uses, and the KV cache planned for it."""

    fit: Fit
    plan: KVCachePlan


def alone(model: Examined) -> tuple[Diagnosis | None, Fitted | None]:
    """Examine whether a model fits where it will run, as if it were alone there."""
    checkpoint = model.checkpoint
    if checkpoint is None:
        return None, None  # what is wrong with it has been said
    room, weights = _memory(model), checkpoint.loaded_bytes()
    if room is None or weights is None:
        what = "of its device" if room is None else "of its weights"
        text = f"unknown, since the size {what} is; --kv-cache-memory-bytes sets the cache"
        return Diagnosis(SECTION, model.role, Mark.WARNING, text), None
    fit, make = plan_fit(model.settings, checkpoint, room, weights)
    facts = {f"{name.replace(' ', '_')}_bytes": size for name, size in fit.taken.items()}
    facts |= {"free_bytes": room.free, "limit_bytes": fit.limit}
    try:
        fit.require_one()
        plan = make()
    except ConfigError as error:
        return Diagnosis(SECTION, model.role, Mark.ERROR, str(error), facts), None
    facts["kv_cache_bytes"] = plan.total_bytes
    if of_heads := fit.of_heads(plan):
        facts["head_cache_bytes"] = of_heads
    each = ", each of the ranks" if checkpoint.tensor_parallel_size > 1 else ""
    warning = fit.warning(plan)
    line = fit.line(plan).partition(": ")[2]
    text = f"{fit.device}{each}: {line}" + (f"; {warning}" if warning else "")
    mark = Mark.WARNING if warning else Mark.OK
    return Diagnosis(SECTION, model.role, mark, text, facts), Fitted(fit, plan)


def _memory(model: Examined) -> DeviceMemory | None:
    """The memory of the model's first device."""
    if model.device is None or model.device.type == "cpu":
        return host_memory()
    found = gpus()
    index = model.device.index or 0
    return found[index].memory if index < len(found) else None


def together(fitted: Sequence[Fitted]) -> Iterator[Diagnosis]:
    """Examine models that share a device."""
    if len(fitted) < 2 or len({str(fit.device) for fit, _ in fitted}) > 1:
        return
    least = sum(fit.bytes_with(fit.slot) for fit, _ in fitted)
    most = sum(fit.bytes_with(plan) for fit, plan in fitted)
    memory, device = fitted[0].fit.memory, fitted[0].fit.device
    room = memory.free + memory.own
    text = f"{device}: {readable(most)} of {readable(room)}"
    mark = Mark.OK
    if least > room:
        mark = Mark.ERROR
        text = (
            f"{device}: with one session each they need {readable(least)} of {readable(room)}; "
            "put the draft model on another device (--draft-device), use a smaller one, or free "
            "memory"
        )
    elif most > room:
        mark = Mark.WARNING
        text += "; lower --max-sessions or --max-model-len"
    facts = {"needed_bytes": least, "planned_bytes": most, "free_bytes": room}
    yield Diagnosis(SECTION, "together", mark, text, facts)
