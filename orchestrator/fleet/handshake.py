"""What is looked at before a service is used: protocol, model, tokenizer, a proposal on trial."""

from __future__ import annotations

import time

from flyspec.errors import FlyspecError, IncompatibleError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.values.admin import (
    PROTOCOL_VERSION,
    DraftServiceInfo,
    ModelInfo,
    TokenizerBundle,
    VerifyServiceInfo,
)
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import SamplingParams
from orchestrator.fleet.replicas import Replica
from orchestrator.upstreams.protocol import DraftUpstream

PROBE_TOKENS = 4


def target_misfit(address: str, info: VerifyServiceInfo, known: ModelInfo | None) -> str:
    """Why a replica of the target cannot be used; `known` is the model of the others."""
    if info.protocol_version != PROTOCOL_VERSION:
        return _other_protocol(f"the verify service at {address}", info.protocol_version)
    if known is None:
        return ""
    theirs = info.model
    for what, mine, other in (
        ("tokenizer", known.tokenizer_fingerprint, theirs.tokenizer_fingerprint),
        ("vocabulary size", known.vocab_size, theirs.vocab_size),
        ("context length", known.context_length, theirs.context_length),
        ("number of parameters", known.num_parameters, theirs.num_parameters),
    ):
        if mine != other:
            return (
                f"the verify service at {address} runs another model, {theirs.name}: its {what} is "
                f"{other}, that of {known.name} {mine}; restart the orchestrator to change the "
                "target"
            )
    return ""


async def drafter_misfit(
    service: DraftUpstream, info: DraftServiceInfo, target: ModelInfo, bundle: TokenizerBundle
) -> str:
    """Why a draft service cannot be used; makes the target's tokenizer known to it.

    Raises `UnavailableError` when it does not answer.
    """
    if info.protocol_version != PROTOCOL_VERSION:
        return _other_protocol(f"the draft service at {service.address}", info.protocol_version)
    foreign = [d for d in info.drafters if is_foreign(d.model, target)]
    if not foreign or target.tokenizer_fingerprint in info.tokenizer_fingerprints:
        return ""
    try:
        await service.add_tokenizer(bundle, target.vocab_size)
    except UnavailableError:
        raise
    except FlyspecError as error:
        return (
            f"the drafter {foreign[0].name!r} at {service.address} speaks another tokenizer than "
            f"the target {target.name} and cannot translate: {error}; use a draft model with the "
            "target's tokenizer, or the drafter prompt_lookup"
        )
    return ""


def is_foreign(model: ModelInfo | None, target: ModelInfo) -> bool:
    """Whether a drafter's model speaks another tokenizer than the target."""
    return model is not None and model.tokenizer_fingerprint != target.tokenizer_fingerprint


async def try_drafter(
    replica: Replica[DraftUpstream], kind: str, prompt: list[int], target: ModelInfo
) -> int:
    """Let a drafter propose what follows a prompt; the time that it took, ns.

    Raises `FlyspecError`.
    """
    open_ = DraftOpen(
        (), SamplingParams(), 0, kind, tokenizer_fingerprint=target.tokenizer_fingerprint
    )
    session = replica.service.open(open_, SpeculationMetrics())
    began = time.perf_counter_ns()
    try:
        proposal = await session.propose(
            TokenSequence(prompt), PROBE_TOKENS, 1, replica.service.timeout_s
        )
    finally:
        session.close()
    if len(proposal.token_ids) > PROBE_TOKENS:
        raise IncompatibleError(
            f"it proposed {len(proposal.token_ids)} tokens, {PROBE_TOKENS} were asked for"
        )
    return time.perf_counter_ns() - began


def _other_protocol(service: str, version: int) -> str:
    return (
        f"{service} speaks protocol {version}, this orchestrator {PROTOCOL_VERSION}: run the same "
        "release of both"
    )
