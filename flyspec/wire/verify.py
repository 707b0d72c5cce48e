"""Messages of `verify.proto`."""

from __future__ import annotations

from flyspec.errors import InvalidArgumentError
from flyspec.v1 import verify_pb2
from flyspec.values.admin import TokenizerBundle, VerifyServiceInfo
from flyspec.values.rounds import (
    Budget,
    Decision,
    DraftDistributions,
    OpenWindow,
    Outcome,
    VerifyOpen,
    VerifyRound,
)
from flyspec.wire.common import (
    distribution_from_proto,
    distribution_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    process_info_from_proto,
    process_info_to_proto,
    rule_from_proto,
    rule_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    session_status_from_proto,
    session_status_to_proto,
)

TOKENIZER_CHUNK_BYTES = 1 << 20

# Looked up once a token: several times faster than calling the enum.
_OUTCOMES = {int(outcome): outcome for outcome in Outcome}


def verify_info_to_proto(info: VerifyServiceInfo) -> verify_pb2.VerifyServiceDescribeResponse:
    """Write the verify service's description."""
    return verify_pb2.VerifyServiceDescribeResponse(
        protocol_version=info.protocol_version,
        model=model_info_to_proto(info.model),
        sessions=session_status_to_proto(info.sessions),
        max_speculative_tokens=info.max_speculative_tokens,
        max_plain_tokens=info.max_plain_tokens,
        rules=info.rules,
        process=process_info_to_proto(info.process),
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
        process=process_info_from_proto(message.process),
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
            logprobs=open_.logprobs,
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
            open_window=window_to_proto(round_.open_window),
            traceparent=round_.traceparent,
        )
    )


def distributions_to_proto(distributions: DraftDistributions) -> verify_pb2.VerifyRequest:
    """Write distributions of a round's drafts."""
    return verify_pb2.VerifyRequest(
        distributions=verify_pb2.DraftDistributions(
            round_id=distributions.round_id,
            first_position=distributions.first_position,
            distributions=[distribution_to_proto(q) for q in distributions.distributions],
        )
    )


def window_to_proto(window: OpenWindow | None) -> verify_pb2.OpenWindow | None:
    """Write an open window; None for none."""
    if window is None:
        return None
    logprobs = window.target_logprobs
    return verify_pb2.OpenWindow(
        position=window.position,
        target_token_id=window.target_token_id,
        remaining_matches=window.remaining_matches,
        gap_nats=window.gap_nats,
        target_logprobs=logprobs_to_proto(logprobs) if logprobs else None,
    )


def window_from_proto(message: verify_pb2.OpenWindow) -> OpenWindow:
    """Read an open window."""
    return OpenWindow(
        message.position,
        message.target_token_id,
        message.remaining_matches,
        message.gap_nats,
        logprobs_from_proto(message.target_logprobs)
        if message.HasField("target_logprobs")
        else None,
    )


def verify_request_from_proto(
    message: verify_pb2.VerifyRequest,
) -> VerifyOpen | VerifyRound | DraftDistributions:
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
                logprobs=o.logprobs if o.HasField("logprobs") else None,
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
                open_window=(
                    window_from_proto(r.open_window) if r.HasField("open_window") else None
                ),
                traceparent=r.traceparent,
            )
        case "distributions":
            q = message.distributions
            return DraftDistributions(
                q.round_id,
                q.first_position,
                [distribution_from_proto(d) for d in q.distributions],
            )
        case _:
            raise InvalidArgumentError(
                "VerifyRequest.request: set one of open, round, distributions"
            )


_EXACT_MESSAGE = verify_pb2.Decision(outcome=verify_pb2.DECISION_OUTCOME_EXACT)
_EXACT = Decision(Outcome.EXACT)


def decision_to_proto(decision: Decision) -> verify_pb2.Decision:
    """Write a decision; the target's token is left out where the drafted one equals it."""
    if decision.outcome is Outcome.EXACT:
        return _EXACT_MESSAGE
    return verify_pb2.Decision(
        outcome=verify_pb2.DecisionOutcome.ValueType(decision.outcome),
        target_token_id=decision.target_token_id,
        entropy=decision.entropy,
        gap_nats=decision.gap_nats,
        measure=decision.measure,
    )


def decision_from_proto(message: verify_pb2.Decision) -> Decision:
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
        message.measure if message.HasField("measure") else None,
    )
