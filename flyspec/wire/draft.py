"""Messages of `draft.proto`."""

from __future__ import annotations

from flyspec.errors import InvalidArgumentError
from flyspec.v1 import common_pb2, draft_pb2
from flyspec.values.admin import DrafterInfo, DraftServiceInfo, TokenizerBundle, TokenizerFacts
from flyspec.values.rounds import (
    DistributionSpec,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    DraftTimings,
)
from flyspec.values.tokens import Origin
from flyspec.wire.common import (
    distribution_from_proto,
    distribution_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    process_info_from_proto,
    process_info_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    session_status_from_proto,
    session_status_to_proto,
)
from flyspec.wire.verify import TOKENIZER_CHUNK_BYTES

# Looked up once a token: several times faster than calling the enum.
_ORIGINS = {int(origin): origin for origin in Origin}


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
        process=process_info_to_proto(info.process),
        tokenizer_fingerprints=info.tokenizer_fingerprints,
    )


def draft_info_from_proto(message: draft_pb2.DraftServiceDescribeResponse) -> DraftServiceInfo:
    """Read the draft service's description."""
    return DraftServiceInfo(
        drafters=tuple(drafter_info_from_proto(d) for d in message.drafters),
        sessions=session_status_from_proto(message.sessions),
        max_speculative_tokens=message.max_speculative_tokens,
        protocol_version=message.protocol_version,
        process=process_info_from_proto(message.process),
        tokenizer_fingerprints=tuple(message.tokenizer_fingerprints),
    )


def draft_open_to_proto(open_: DraftOpen) -> draft_pb2.DraftRequest:
    """Write the opening of a draft session."""
    return draft_pb2.DraftRequest(
        open=draft_pb2.DraftOpen(
            token_ids=open_.token_ids,
            sampling=sampling_to_proto(open_.sampling),
            seed=open_.seed,
            drafter=open_.drafter,
            prompt_length=open_.prompt_length,
            distribution=(
                draft_pb2.DistributionSpec(
                    top_k=spec.top_k, draw_from_it=spec.draw_from_it, raw=spec.raw
                )
                if (spec := open_.distribution)
                else None
            ),
            tokenizer_fingerprint=open_.tokenizer_fingerprint,
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
            traceparent=advance.traceparent,
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
                prompt_length=o.prompt_length,
                distribution=(
                    DistributionSpec(
                        o.distribution.top_k, o.distribution.draw_from_it, o.distribution.raw
                    )
                    if o.HasField("distribution")
                    else None
                ),
                tokenizer_fingerprint=o.tokenizer_fingerprint,
            )
        case "advance":
            a = message.advance
            return DraftAdvance(
                a.round_id, a.keep_length, list(a.append_token_ids), a.max_tokens, a.traceparent
            )
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
        distributions=[distribution_to_proto(q) for q in chunk.distributions],
    )


def draft_chunk_from_proto(message: draft_pb2.DraftResponse) -> DraftChunk:
    """Read a piece of a proposal. An origin that is missing or unknown is refused."""
    if len(message.origins) != len(message.token_ids):
        raise InvalidArgumentError(
            f"DraftResponse.origins: {len(message.origins)} for {len(message.token_ids)} token_ids"
        )
    if len(message.distributions) not in (0, len(message.token_ids)):
        raise InvalidArgumentError(
            f"DraftResponse.distributions: {len(message.distributions)} for "
            f"{len(message.token_ids)} token_ids"
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
        distributions=tuple(distribution_from_proto(q) for q in message.distributions),
    )


def add_tokenizer_to_protos(
    bundle: TokenizerBundle, vocab_size: int
) -> list[draft_pb2.AddTokenizerRequest]:
    """Write a target's tokenizer as the messages of `AddTokenizer`, facts first.

    `vocab_size` is that of the target's output layer.
    """
    facts = draft_pb2.TokenizerFacts(
        fingerprint=bundle.fingerprint,
        eos_token_ids=bundle.eos_token_ids,
        control_token_ids=bundle.control_token_ids,
        vocab_size=vocab_size,
    )
    data = bundle.tokenizer_json
    chunks = [
        draft_pb2.AddTokenizerRequest(tokenizer_json_chunk=data[i : i + TOKENIZER_CHUNK_BYTES])
        for i in range(0, len(data), TOKENIZER_CHUNK_BYTES)
    ]
    return [draft_pb2.AddTokenizerRequest(facts=facts), *chunks]


def add_tokenizer_from_proto(message: draft_pb2.AddTokenizerRequest) -> TokenizerFacts | bytes:
    """Read a message of `AddTokenizer`: the facts, or a piece of `tokenizer.json`."""
    match message.WhichOneof("request"):
        case "facts":
            f = message.facts
            return TokenizerFacts(
                f.fingerprint, tuple(f.eos_token_ids), tuple(f.control_token_ids), f.vocab_size
            )
        case "tokenizer_json_chunk":
            return message.tokenizer_json_chunk
        case _:
            raise InvalidArgumentError(
                "AddTokenizerRequest.request: set one of facts, tokenizer_json_chunk"
            )
