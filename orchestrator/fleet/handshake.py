"""Compatibility checks before a service is used: protocol, tokenizer, and a trial proposal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from flyspec.errors import FlyspecError, UnavailableError
from flyspec.values.admin import (
    PROTOCOL_VERSION,
    DrafterInfo,
    DraftServiceInfo,
    ModelInfo,
    VerifyServiceInfo,
)
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import DraftAdvance, DraftOpen
from flyspec.values.tokens import SamplingParams
from orchestrator.fleet.drafter import of_kind
from orchestrator.fleet.replicas import Replica
from orchestrator.fleet.target import Target
from orchestrator.upstreams.protocol import DraftUpstream, time_limit_ms

log = logging.getLogger(__name__)

PROBE_TEXT = "The cat sat on the mat, and the dog sat on the"
PROBE_TOKENS = 4


async def drafter_misfit(service: DraftUpstream, info: DraftServiceInfo, target: Target) -> str:
    """Return why a draft service cannot be used, or "" after sending it the target's tokenizer.

    The tokenizer is only sent if the service needs it. Raises `UnavailableError` if the service
    does not answer.
    """
    if problem := protocol_misfit(f"the draft service at {service.address}", info):
        return problem
    model = target.info.model
    foreign = [d for d in info.drafters if is_foreign(d.model, model)]
    if not foreign or model.tokenizer_fingerprint in info.tokenizer_fingerprints:
        return ""
    try:
        await service.add_tokenizer(target.bundle, model.vocab_size)
    except UnavailableError:
        raise
    except FlyspecError as error:
        return (
            f"the tokenizer of drafter {foreign[0].name!r} at {service.address} differs from that "
            f"of target {model.name} and cannot be translated: {error}; use a draft model with "
            "the target's tokenizer, or the drafter prompt_lookup"
        )
    return ""


def fitting(offered: Sequence[DrafterInfo], target: ModelInfo) -> Iterator[DrafterInfo]:
    """Yield the drafters that work with the target's tokenizer, and log which do not."""
    for info in offered:
        if info.tokenizer_fingerprint in ("", target.tokenizer_fingerprint):
            yield info
        else:
            log.warning("drafter %s is left out: its datastore is of another tokenizer than that "
                        "of %s; build one with `flyspec datastore build`",
                        info.name, target.name)  # fmt: skip


def is_foreign(model: ModelInfo | None, target: ModelInfo) -> bool:
    """True if a drafter's model has a different tokenizer than the target."""
    return model is not None and model.tokenizer_fingerprint != target.tokenizer_fingerprint


def drafter_vocab_size(model: ModelInfo | None, target: ModelInfo) -> int:
    """Return the vocabulary size of proposals by a drafter with that model (None: no model)."""
    return target.vocab_size if model is None or is_foreign(model, target) else model.vocab_size


async def try_drafter(replica: Replica[DraftUpstream], kind: str, target: Target) -> int:
    """Have a drafter propose a continuation of a short text; return the time taken, in ns.

    Raises `FlyspecError`.
    """
    prompt, model = target.tokenizer.encode(PROBE_TEXT), target.info.model
    offered = of_kind(replica.info.drafters, kind)
    open_ = DraftOpen(
        (),
        SamplingParams(),
        0,
        kind,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        drafter_vocab_size=drafter_vocab_size(offered.model if offered else None, model),
    )
    session = replica.service.open(open_, SpeculationMetrics())
    began, timeout_s = time.perf_counter_ns(), replica.service.timeout_s
    try:
        request = DraftAdvance(1, 0, (), PROBE_TOKENS, time_limit_ms=time_limit_ms(timeout_s))
        await session.propose(prompt, request, timeout_s)
    finally:
        session.close()
    return time.perf_counter_ns() - began


def protocol_misfit(service: str, info: DraftServiceInfo | VerifyServiceInfo) -> str:
    """Return why a service cannot be used, whatever its models; empty if it can."""
    if info.protocol_version == PROTOCOL_VERSION:
        return ""
    return (
        f"{service} uses protocol version {info.protocol_version}, this orchestrator "
        f"{PROTOCOL_VERSION}; run the same release of both"
    )
