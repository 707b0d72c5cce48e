"""Protobuf messages to our types and back: the only module that knows both.

Conversions are total: what protobuf cannot rule out (an unknown enum number, a missing oneof) is
refused here with `InvalidArgumentError`. Ranges are the receiving service's business.
"""

from __future__ import annotations

from flyspec.errors import InvalidArgumentError
from flyspec.types import (
    Budget,
    Decision,
    DraftAdvance,
    DraftChunk,
    DrafterInfo,
    DraftOpen,
    DraftServiceInfo,
    DraftTimings,
    EntropyMeasure,
    ModelInfo,
    Origin,
    Outcome,
    RoundVerdict,
    Rule,
    SamplingParams,
    SessionStatus,
    TokenizerBundle,
    VerifyOpen,
    VerifyRound,
    VerifyServiceInfo,
    VerifyTimings,
)
from flyspec.v1 import common_pb2, draft_pb2, verify_pb2

TOKENIZER_CHUNK_BYTES = 1 << 20

# Looked up once a token: several times faster than calling the enum.
_OUTCOMES = {int(outcome): outcome for outcome in Outcome}
_ORIGINS = {int(origin): origin for origin in Origin}


# --- common ---------------------------------------------------------------------------------


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Write sampling parameters; defaults stay unset."""
    message = common_pb2.SamplingParams(temperature=sampling.temperature)
    if sampling.top_p != 1.0:
        message.top_p = sampling.top_p
    if sampling.top_k:
        message.top_k = sampling.top_k
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
    )


def rule_to_proto(rule: Rule) -> common_pb2.Rule:
    """Write a rule; parameters left to the preset stay unset."""
    return common_pb2.Rule(
        name=rule.name,
        fly_window_size=rule.fly_window_size,
        fly_entropy_threshold=rule.fly_entropy_threshold,
        fly_entropy_top_k=rule.fly_entropy_top_k,
        entropy_measure=common_pb2.EntropyMeasure.ValueType(rule.entropy_measure or 0),
    )


def rule_from_proto(message: common_pb2.Rule) -> Rule:
    """Read a rule."""
    try:
        measure = EntropyMeasure(message.entropy_measure) if message.entropy_measure else None
    except ValueError as error:
        raise InvalidArgumentError(
            f"rule.entropy_measure: {message.entropy_measure} is not normalized (1) or top_k (2)"
        ) from error
    return Rule(
        name=message.name,
        fly_window_size=message.fly_window_size if message.HasField("fly_window_size") else None,
        fly_entropy_threshold=(
            message.fly_entropy_threshold if message.HasField("fly_entropy_threshold") else None
        ),
        fly_entropy_top_k=(
            message.fly_entropy_top_k if message.HasField("fly_entropy_top_k") else None
        ),
        entropy_measure=measure,
    )


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """Write facts about a model."""
    return common_pb2.ModelInfo(
        name=info.name,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        dtype=info.dtype,
        device=info.device,
        num_parameters=info.num_parameters,
    )


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """Read facts about a model."""
    return ModelInfo(
        name=message.name,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        dtype=message.dtype,
        device=message.device,
        num_parameters=message.num_parameters,
    )


def session_status_to_proto(status: SessionStatus) -> common_pb2.SessionStatus:
    """Write a session count."""
    return common_pb2.SessionStatus(
        active=status.active, limit=status.limit, opened_total=status.opened_total
    )


def session_status_from_proto(message: common_pb2.SessionStatus) -> SessionStatus:
    """Read a session count."""
    return SessionStatus(message.active, message.limit, message.opened_total)


# --- draft service --------------------------------------------------------------------------


def drafter_info_to_proto(info: DrafterInfo) -> draft_pb2.DrafterInfo:
    """Write a drafter's description."""
    return draft_pb2.DrafterInfo(
        name=info.name,
        kind=info.kind,
        model=model_info_to_proto(info.model) if info.model else None,
    )


def drafter_info_from_proto(message: draft_pb2.DrafterInfo) -> DrafterInfo:
    """Read a drafter's description."""
    return DrafterInfo(
        name=message.name,
        kind=message.kind,
        model=model_info_from_proto(message.model) if message.HasField("model") else None,
    )


def draft_info_to_proto(info: DraftServiceInfo) -> draft_pb2.DraftServiceDescribeResponse:
    """Write the draft service's description."""
    return draft_pb2.DraftServiceDescribeResponse(
        protocol_version=info.protocol_version,
        drafters=[drafter_info_to_proto(d) for d in info.drafters],
        sessions=session_status_to_proto(info.sessions),
        max_speculative_tokens=info.max_speculative_tokens,
    )


def draft_info_from_proto(message: draft_pb2.DraftServiceDescribeResponse) -> DraftServiceInfo:
    """Read the draft service's description."""
    return DraftServiceInfo(
        drafters=tuple(drafter_info_from_proto(d) for d in message.drafters),
        sessions=session_status_from_proto(message.sessions),
        max_speculative_tokens=message.max_speculative_tokens,
        protocol_version=message.protocol_version,
    )


def draft_open_to_proto(open_: DraftOpen) -> draft_pb2.DraftRequest:
    """Write the opening of a draft session."""
    return draft_pb2.DraftRequest(
        open=draft_pb2.DraftOpen(
            token_ids=open_.token_ids,
            sampling=sampling_to_proto(open_.sampling),
            seed=open_.seed,
            drafter=open_.drafter,
        )
    )


def draft_advance_to_proto(advance: DraftAdvance) -> draft_pb2.DraftRequest:
    """Write the request for a proposal."""
    return draft_pb2.DraftRequest(
        advance=draft_pb2.DraftAdvance(
            round_id=advance.round_id,
            keep_length=advance.keep_length,
            append_token_ids=advance.append_token_ids,
            max_tokens=advance.max_tokens,
        )
    )


def draft_request_from_proto(message: draft_pb2.DraftRequest) -> DraftOpen | DraftAdvance:
    """Read a message to the draft service."""
    match message.WhichOneof("request"):
        case "open":
            o = message.open
            return DraftOpen(
                token_ids=list(o.token_ids),
                sampling=sampling_from_proto(o.sampling),
                seed=o.seed,
                drafter=o.drafter,
            )
        case "advance":
            a = message.advance
            return DraftAdvance(a.round_id, a.keep_length, list(a.append_token_ids), a.max_tokens)
        case _:
            raise InvalidArgumentError("DraftRequest.request: set one of open, advance")


def draft_chunk_to_proto(chunk: DraftChunk) -> draft_pb2.DraftResponse:
    """Write a piece of a proposal."""
    return draft_pb2.DraftResponse(
        round_id=chunk.round_id,
        builds_on=common_pb2.BuildsOn(
            keep_length=chunk.keep_length, next_token_id=chunk.next_token_id
        ),
        start_position=chunk.start_position,
        token_ids=chunk.token_ids,
        origins=[common_pb2.TokenOrigin.ValueType(o) for o in chunk.origins],
        last=chunk.last,
        queue_ns=chunk.timings.queue_ns,
        model_ns=chunk.timings.model_ns,
        service_ns=chunk.timings.service_ns,
    )


def draft_chunk_from_proto(message: draft_pb2.DraftResponse) -> DraftChunk:
    """Read a piece of a proposal. An origin that is missing or unknown is refused."""
    if len(message.origins) != len(message.token_ids):
        raise InvalidArgumentError(
            f"DraftResponse.origins: {len(message.origins)} for {len(message.token_ids)} token_ids"
        )
    try:
        origins = [_ORIGINS[o] for o in message.origins]
    except KeyError as error:
        raise InvalidArgumentError(f"DraftResponse.origins: no origin {error}") from error
    return DraftChunk(
        round_id=message.round_id,
        keep_length=message.builds_on.keep_length,
        next_token_id=message.builds_on.next_token_id,
        start_position=message.start_position,
        token_ids=list(message.token_ids),
        origins=origins,
        last=message.last,
        timings=DraftTimings(message.queue_ns, message.model_ns, message.service_ns),
    )


# --- verify service -------------------------------------------------------------------------


def verify_info_to_proto(info: VerifyServiceInfo) -> verify_pb2.VerifyServiceDescribeResponse:
    """Write the verify service's description."""
    return verify_pb2.VerifyServiceDescribeResponse(
        protocol_version=info.protocol_version,
        model=model_info_to_proto(info.model),
        sessions=session_status_to_proto(info.sessions),
        max_speculative_tokens=info.max_speculative_tokens,
        max_plain_tokens=info.max_plain_tokens,
        rules=info.rules,
    )


def verify_info_from_proto(message: verify_pb2.VerifyServiceDescribeResponse) -> VerifyServiceInfo:
    """Read the verify service's description."""
    return VerifyServiceInfo(
        model=model_info_from_proto(message.model),
        sessions=session_status_from_proto(message.sessions),
        max_speculative_tokens=message.max_speculative_tokens,
        max_plain_tokens=message.max_plain_tokens,
        rules=tuple(message.rules),
        protocol_version=message.protocol_version,
    )


def tokenizer_to_protos(bundle: TokenizerBundle) -> list[verify_pb2.GetTokenizerResponse]:
    """Write a tokenizer as the messages of `GetTokenizer`, metadata first."""
    metadata = verify_pb2.TokenizerMetadata(
        chat_template=bundle.chat_template,
        eos_token_ids=bundle.eos_token_ids,
        bos_token_id=bundle.bos_token_id,
        control_token_ids=bundle.control_token_ids,
        generation_config_json=bundle.generation_config_json,
        fingerprint=bundle.fingerprint,
    )
    data = bundle.tokenizer_json
    chunks = [
        verify_pb2.GetTokenizerResponse(tokenizer_json_chunk=data[i : i + TOKENIZER_CHUNK_BYTES])
        for i in range(0, len(data), TOKENIZER_CHUNK_BYTES)
    ]
    return [verify_pb2.GetTokenizerResponse(metadata=metadata), *chunks]


def tokenizer_from_protos(messages: list[verify_pb2.GetTokenizerResponse]) -> TokenizerBundle:
    """Read the messages of `GetTokenizer`."""
    if not messages or messages[0].WhichOneof("response") != "metadata":
        raise InvalidArgumentError("GetTokenizerResponse.response: metadata must come first")
    m = messages[0].metadata
    return TokenizerBundle(
        tokenizer_json=b"".join(x.tokenizer_json_chunk for x in messages[1:]),
        fingerprint=m.fingerprint,
        eos_token_ids=tuple(m.eos_token_ids),
        control_token_ids=tuple(m.control_token_ids),
        bos_token_id=m.bos_token_id if m.HasField("bos_token_id") else None,
        chat_template=m.chat_template,
        generation_config_json=m.generation_config_json,
    )


def verify_open_to_proto(open_: VerifyOpen) -> verify_pb2.VerifyRequest:
    """Write the opening of a verify session."""
    return verify_pb2.VerifyRequest(
        open=verify_pb2.VerifyOpen(
            token_ids=open_.token_ids,
            prompt_length=open_.prompt_length,
            rule=rule_to_proto(open_.rule),
            sampling=sampling_to_proto(open_.sampling),
            seed=open_.seed,
        )
    )


def verify_round_to_proto(round_: VerifyRound) -> verify_pb2.VerifyRequest:
    """Write a round."""
    return verify_pb2.VerifyRequest(
        round=verify_pb2.VerifyRound(
            round_id=round_.round_id,
            keep_length=round_.keep_length,
            append_token_ids=round_.append_token_ids,
            prefix_hash=round_.prefix_hash,
            draft_token_ids=round_.draft_token_ids,
            max_plain_tokens=round_.max_plain_tokens,
            remaining_loose_tokens=round_.budget.loose_tokens,
            remaining_loose_cost_nats=round_.budget.loose_cost_nats,
            exact_until_position=round_.exact_until_position,
        )
    )


def verify_request_from_proto(message: verify_pb2.VerifyRequest) -> VerifyOpen | VerifyRound:
    """Read a message to the verify service."""
    match message.WhichOneof("request"):
        case "open":
            o = message.open
            return VerifyOpen(
                token_ids=list(o.token_ids),
                prompt_length=o.prompt_length,
                rule=rule_from_proto(o.rule),
                sampling=sampling_from_proto(o.sampling),
                seed=o.seed,
            )
        case "round":
            r = message.round
            return VerifyRound(
                round_id=r.round_id,
                keep_length=r.keep_length,
                append_token_ids=list(r.append_token_ids),
                draft_token_ids=list(r.draft_token_ids),
                prefix_hash=r.prefix_hash,
                max_plain_tokens=max(1, r.max_plain_tokens),
                budget=Budget(
                    r.remaining_loose_tokens if r.HasField("remaining_loose_tokens") else None,
                    r.remaining_loose_cost_nats
                    if r.HasField("remaining_loose_cost_nats")
                    else None,
                ),
                exact_until_position=r.exact_until_position,
            )
        case _:
            raise InvalidArgumentError("VerifyRequest.request: set one of open, round")


_EXACT_MESSAGE = verify_pb2.Decision(outcome=verify_pb2.DECISION_OUTCOME_EXACT)
_EXACT = Decision(Outcome.EXACT)


def _decision_to_proto(decision: Decision) -> verify_pb2.Decision:
    """Write a decision; the target's token is left out where the drafted one equals it."""
    if decision.outcome is Outcome.EXACT:
        return _EXACT_MESSAGE
    return verify_pb2.Decision(
        outcome=verify_pb2.DecisionOutcome.ValueType(decision.outcome),
        target_token_id=decision.target_token_id,
        entropy=decision.entropy,
        gap_nats=decision.gap_nats,
    )


def round_verdict_to_proto(verdict: RoundVerdict) -> verify_pb2.VerifyResponse:
    """Write a verdict."""
    return verify_pb2.VerifyResponse(
        round_id=verdict.round_id,
        keep_length=verdict.keep_length,
        next_token_id=verdict.next_token_id,
        committed_length=verdict.committed_length,
        decisions=[_decision_to_proto(d) for d in verdict.decisions],
        last=verdict.last,
        queue_ns=verdict.timings.queue_ns,
        forward_ns=verdict.timings.forward_ns,
        judge_ns=verdict.timings.judge_ns,
        service_ns=verdict.timings.service_ns,
    )


def _decision_from_proto(message: verify_pb2.Decision) -> Decision:
    """Read a decision. `target_token_id` stays None where it equals the drafted token."""
    outcome = _OUTCOMES.get(message.outcome)
    if outcome is Outcome.EXACT:
        return _EXACT
    if outcome is None:
        raise InvalidArgumentError(f"VerifyResponse.decisions: no outcome {message.outcome}")
    return Decision(
        outcome,
        message.target_token_id if message.HasField("target_token_id") else None,
        message.entropy if message.HasField("entropy") else None,
        message.gap_nats if message.HasField("gap_nats") else None,
    )


def round_verdict_from_proto(message: verify_pb2.VerifyResponse) -> RoundVerdict:
    """Read a verdict."""
    return RoundVerdict(
        round_id=message.round_id,
        keep_length=message.keep_length,
        next_token_id=message.next_token_id,
        committed_length=message.committed_length,
        decisions=[_decision_from_proto(d) for d in message.decisions],
        last=message.last,
        timings=VerifyTimings(
            message.queue_ns, message.forward_ns, message.judge_ns, message.service_ns
        ),
    )
