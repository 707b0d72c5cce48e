"""Which message holds which value, and exceptions from the codec's mapping by field name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2
from flyspec.values import admin, generation, requests, rounds
from flyspec.values.chat import Chat
from flyspec.values.requests import GenerateOptions, GenerationRequest, Prompt
from flyspec.values.rounds import Decision, DraftChunk, Outcome, Verdict, VerifyRound
from flyspec.wire import chats

Encode = Callable[[Any], Mapping[str, Any]]
"""Converts a value to keyword arguments of its message's constructor, nested messages included."""
Decode = Callable[..., Any]

VALUES: Mapping[Any, type] = {
    draft_pb2.DraftServiceDescribeResponse: admin.DraftServiceInfo,
    draft_pb2.DraftOpen: rounds.DraftOpen,
    draft_pb2.DraftAdvance: rounds.DraftAdvance,
    draft_pb2.DraftResponse: DraftChunk,
    draft_pb2.TokenizerFacts: admin.TokenizerFacts,
    verify_pb2.VerifyServiceDescribeResponse: admin.VerifyServiceInfo,
    verify_pb2.TokenizerMetadata: admin.TokenizerBundle,
    verify_pb2.VerifyOpen: rounds.VerifyOpen,
    verify_pb2.VerifyRound: VerifyRound,
    verify_pb2.DraftDistributions: rounds.DraftDistributions,
    verify_pb2.VerifyResponse: Verdict,
    generation_pb2.GenerateRequest: GenerationRequest,
    generation_pb2.ScoreRequest: requests.ScoreRequest,
    generation_pb2.ScoreResponse: generation.ScoredTokens,
    generation_pb2.GenerationStarted: generation.Started,
    generation_pb2.GenerationChunk: generation.Chunk,
    generation_pb2.GenerationRetract: generation.Retract,
    generation_pb2.GenerationRound: generation.RoundRecord,
    generation_pb2.GenerationCompletion: generation.Completion,
    generation_pb2.GenerationRecording: generation.Recording,
    generation_pb2.ListModelsResponse: generation.Models,
    admin_pb2.GetStatusResponse: admin.Status,
    admin_pb2.DrafterStatus: admin.DrafterStatus,
}
"""The value of each top-level message; parts of these are found by their fields."""

ENVELOPES: tuple[Any, ...] = (
    draft_pb2.DraftRequest,
    draft_pb2.AddTokenizerRequest,
    verify_pb2.VerifyRequest,
    verify_pb2.GetTokenizerResponse,
    generation_pb2.GenerateResponse,
)
"""Messages with a oneof of those messages, or bytes; such a message is only sent inside it."""

PREFIXES = {rounds.Budget: "remaining_"}
"""Prefix of a value's field names where they are inlined in the owner's message."""

LOCAL = {
    GenerateOptions: ("timeout_s", "request_id", "traceparent"),
    admin.TokenizerBundle: ("tokenizer_json",),
    rounds.DraftOpen: ("drafter_vocab_size",),
    DraftChunk: ("drafter", "arrived_ns"),
    Verdict: ("start_length",),
}
"""Fields that are not sent; `decode` may set them."""

CALLED = {"Rule": "rule"}  # in errors


def _write_prompt(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, Chat):
        return {"chat": chats.write(prompt)}
    return {"token_ids": {"ids": prompt}}


def _read_prompt(message: generation_pb2.GenerateRequest | generation_pb2.ScoreRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids[:]
        case "chat":
            return chats.read(message.chat)
    raise InvalidArgumentError("prompt: set one of text, token_ids, chat")


def _write_length(k: SpeculationLength | None) -> Mapping[str, Any]:
    return {"adaptive": True} if k == AUTO else {"num_speculative_tokens": k}


def _read_length(message: generation_pb2.Speculation) -> SpeculationLength | None:
    if not message.HasField("num_speculative_tokens"):
        return AUTO if message.adaptive else None
    if message.adaptive:
        raise InvalidArgumentError(
            "speculation: adaptive and num_speculative_tokens are both given; set one of them"
        )
    return message.num_speculative_tokens


def _write_prediction(prediction: str | Sequence[int]) -> Mapping[str, Any]:
    return {"prediction" if isinstance(prediction, str) else "prediction_token_ids": prediction}


def _read_prediction(message: generation_pb2.GenerateRequest) -> str | Sequence[int]:
    if not message.prediction_token_ids:
        return message.prediction
    if message.prediction:
        raise InvalidArgumentError("prediction: also given as prediction_token_ids; give one")
    return message.prediction_token_ids[:]


def _write_stop_reason(reason: str | int | None) -> Mapping[str, Any]:
    return {"stop_token_id" if isinstance(reason, int) else "stop_reason": reason}


def _read_stop_reason(message: generation_pb2.GenerationCompletion) -> str | int | None:
    if message.HasField("stop_token_id"):
        return message.stop_token_id
    return message.stop_reason if message.HasField("stop_reason") else None


HOOKS: Mapping[tuple[type, str], tuple[Sequence[str], Encode, Decode]] = {
    **{
        (cls, "prompt"): (("text", "token_ids", "chat"), _write_prompt, _read_prompt)
        for cls in (GenerationRequest, requests.ScoreRequest)
    },
    (GenerateOptions, "num_speculative_tokens"): (
        ("num_speculative_tokens", "adaptive"),
        _write_length,
        _read_length,
    ),
    (GenerateOptions, "prediction"): (
        ("prediction", "prediction_token_ids"),
        _write_prediction,
        _read_prediction,
    ),
    (generation.Completion, "stop_reason"): (
        ("stop_reason", "stop_token_id"),
        _write_stop_reason,
        _read_stop_reason,
    ),
    (VerifyRound, "max_plain_tokens"): (
        ("max_plain_tokens",),
        lambda count: {"max_plain_tokens": count},
        lambda message: max(1, message.max_plain_tokens),
    ),
}
"""Fields with custom conversions: the message's fields, encoder and decoder."""


def _decision(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Share one value and message for all matches, which carry no further data."""
    value = Decision(Outcome.EXACT)
    match_, exact = encode(value), verify_pb2.DECISION_OUTCOME_EXACT
    return (
        lambda decision: match_ if decision.outcome is Outcome.EXACT else encode(decision),
        lambda message: value if message.outcome == exact else decode(message),
    )


def _draft_chunk(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Check for one origin per token, and one or no distribution, confidence and parent."""

    def read(message: draft_pb2.DraftResponse) -> Any:
        count = len(message.token_ids)
        optional = (0, count)
        for name, sizes in (
            ("origins", (count,)),
            ("distributions", optional),
            ("confidences", optional),
            ("parents", optional),
        ):
            if (size := len(getattr(message, name))) not in sizes:
                raise InvalidArgumentError(f"DraftResponse.{name}: {size} for {count} token_ids")
        return decode(message)

    return encode, read


AROUND = {Decision: _decision, DraftChunk: _draft_chunk}
"""Wrappers of a class's encoder and decoder."""
