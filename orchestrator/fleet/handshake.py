"""What is looked at before a service is used: protocol, tokenizer, a proposal on trial."""

from __future__ import annotations

import time

from flyspec.errors import FlyspecError, UnavailableError
from flyspec.values.admin import (
    PROTOCOL_VERSION,
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
from orchestrator.upstreams.protocol import DraftUpstream, VerifyUpstream

PROBE_TEXT = "The cat sat on the mat, and the dog sat on the"
PROBE_TOKENS = 4


def target_misfit(service: VerifyUpstream, info: VerifyServiceInfo) -> str:
    """Why a verify service cannot be used, whatever its model is."""
    if info.protocol_version != PROTOCOL_VERSION:
        return _other_protocol(f"the verify service at {service.address}", info.protocol_version)
    return ""


async def drafter_misfit(service: DraftUpstream, info: DraftServiceInfo, target: Target) -> str:
    """Why a draft service cannot be used; makes the target's tokenizer known to it.

    Raises `UnavailableError` when it does not answer.
    """
    if info.protocol_version != PROTOCOL_VERSION:
        return _other_protocol(f"the draft service at {service.address}", info.protocol_version)
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
            f"the drafter {foreign[0].name!r} at {service.address} speaks another tokenizer than "
            f"the target {model.name} and cannot translate: {error}; use a draft model with the "
            "target's tokenizer, or the drafter prompt_lookup"
        )
    return ""


def is_foreign(model: ModelInfo | None, target: ModelInfo) -> bool:
    """Whether a drafter's model speaks another tokenizer than the target."""
    return model is not None and model.tokenizer_fingerprint != target.tokenizer_fingerprint


def drafter_vocab_size(model: ModelInfo | None, target: ModelInfo) -> int:
    """How many ids the proposals of a drafter with that model have, none if it has no model."""
    return target.vocab_size if model is None or is_foreign(model, target) else model.vocab_size


async def try_drafter(replica: Replica[DraftUpstream], kind: str, target: Target) -> int:
    """Let a drafter propose what follows a text; the time that it took, ns.

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
    began = time.perf_counter_ns()
    try:
        request = DraftAdvance(1, 0, (), PROBE_TOKENS)
        await session.propose(prompt, request, replica.service.timeout_s)
    finally:
        session.close()
    return time.perf_counter_ns() - began


def _other_protocol(service: str, version: int) -> str:
    return (
        f"{service} speaks protocol {version}, this orchestrator {PROTOCOL_VERSION}: run the same "
        "release of both"
    )
