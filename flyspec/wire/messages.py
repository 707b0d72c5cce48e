"""Which message tells which value, and what the codec does not see by the names of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2
from flyspec.values import admin, generation, rounds
from flyspec.values.generation import Chat, GenerateOptions, GenerationRequest, Prompt
from flyspec.values.rounds import Decision, DraftChunk, Outcome, Verdict, VerifyRound

Encode = Callable[[Any], Mapping[str, Any]]
"""From a value to its message's fields, for the message's constructor; messages in it likewise."""
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
    generation_pb2.GenerationStarted: generation.Started,
    generation_pb2.GenerationChunk: generation.Chunk,
    generation_pb2.GenerationRetract: generation.Retract,
    generation_pb2.GenerationRound: generation.RoundRecord,
    generation_pb2.GenerationCompletion: generation.Completion,
    generation_pb2.ListModelsResponse: generation.Models,
    admin_pb2.GetStatusResponse: admin.Status,
    admin_pb2.DrafterStatus: admin.DrafterStatus,
}
"""What is told by itself. Parts of these are found by the fields they are in."""

ENVELOPES: tuple[Any, ...] = (
    draft_pb2.DraftRequest,
    draft_pb2.AddTokenizerRequest,
    verify_pb2.VerifyRequest,
    verify_pb2.GetTokenizerResponse,
    generation_pb2.GenerateResponse,
)
"""Messages that hold one of several of those, which travel in nothing else, or bytes."""

PREFIXES = {rounds.Budget: "remaining_"}
"""Of a value's fields, where they stand in its owner's message."""

LOCAL = {
    GenerateOptions: ("timeout_s", "request_id", "traceparent"),
    admin.TokenizerBundle: ("tokenizer_json",),
    rounds.DraftOpen: ("drafter_vocab_size",),
    DraftChunk: ("drafter", "arrived_ns", "ahead"),
    Verdict: ("start_length",),
}
"""Fields that do not travel; whoever reads a message may give them."""

CALLED = {"Rule": "rule"}  # in errors


def _write_prompt(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, Chat):
        turns = [{"role": role, "content": content} for role, content in prompt.messages]
        return {"chat": {"messages": turns}}
    return {"token_ids": {"ids": prompt}}


def _read_prompt(message: generation_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids[:]
        case "chat":
            return Chat(tuple((turn.role, turn.content) for turn in message.chat.messages))
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


HOOKS: Mapping[tuple[type, str], tuple[Sequence[str], Encode, Decode]] = {
    (GenerationRequest, "prompt"): (("text", "token_ids", "chat"), _write_prompt, _read_prompt),
    (GenerateOptions, "num_speculative_tokens"): (
        ("num_speculative_tokens", "adaptive"),
        _write_length,
        _read_length,
    ),
    (VerifyRound, "max_plain_tokens"): (
        ("max_plain_tokens",),
        lambda count: {"max_plain_tokens": count},
        lambda message: max(1, message.max_plain_tokens),
    ),
}
"""Fields with a form of their own: the message's fields for it, from it to those, and back."""


def _decision(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Of a match nothing more is said: the target's token is the drafted one."""
    value = Decision(Outcome.EXACT)
    match_, exact = encode(value), verify_pb2.DECISION_OUTCOME_EXACT
    return (
        lambda decision: match_ if decision.outcome is Outcome.EXACT else encode(decision),
        lambda message: value if message.outcome == exact else decode(message),
    )


def _draft_chunk(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Every token has its origin, and its distribution if one has."""

    def read(message: draft_pb2.DraftResponse) -> Any:
        count = len(message.token_ids)
        optional = (0, count)
        for name, sizes in (
            ("origins", (count,)),
            ("distributions", optional),
            ("confidences", optional),
        ):
            if (size := len(getattr(message, name))) not in sizes:
                raise InvalidArgumentError(f"DraftResponse.{name}: {size} for {count} token_ids")
        return decode(message)

    return encode, read


AROUND = {Decision: _decision, DraftChunk: _draft_chunk}
"""A class's own way to write and to read, around the one by names."""
