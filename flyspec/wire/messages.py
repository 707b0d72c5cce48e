"""Which value is which message, and what of them the codec does not see by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2
from flyspec.values import admin, generation, rounds
from flyspec.values.generation import Chat, Prompt
from flyspec.values.rounds import Decision, DraftChunk, Outcome
from flyspec.wire.codec import Codec, Decode, Encode, Exceptions, Hook

WHOLE: Mapping[type, Any] = {
    DraftChunk: draft_pb2.DraftResponse,
    rounds.Verdict: verify_pb2.VerifyResponse,
    generation.GenerationRequest: generation_pb2.GenerateRequest,
    generation.Models: generation_pb2.ListModelsResponse,
    admin.DraftServiceInfo: draft_pb2.DraftServiceDescribeResponse,
    admin.VerifyServiceInfo: verify_pb2.VerifyServiceDescribeResponse,
    admin.Status: admin_pb2.GetStatusResponse,
    admin.DrafterStatus: admin_pb2.DrafterStatus,
}
"""Values that are a message by themselves."""

ONE_OF: Mapping[Any, tuple[str, Mapping[str, type]]] = {
    draft_pb2.DraftRequest: (
        "request",
        {"open": rounds.DraftOpen, "advance": rounds.DraftAdvance},
    ),
    draft_pb2.AddTokenizerRequest: (
        "request",
        {"facts": admin.TokenizerFacts, "tokenizer_json_chunk": bytes},
    ),
    verify_pb2.VerifyRequest: (
        "request",
        {
            "open": rounds.VerifyOpen,
            "round": rounds.VerifyRound,
            "distributions": rounds.DraftDistributions,
        },
    ),
    verify_pb2.GetTokenizerResponse: (
        "response",
        {"metadata": admin.TokenizerBundle, "tokenizer_json_chunk": bytes},
    ),
    generation_pb2.GenerateResponse: (
        "response",
        {
            "started": generation.Started,
            "chunk": generation.Chunk,
            "completion": generation.Completion,
            "retract": generation.Retract,
            "round": generation.RoundRecord,
        },
    ),
}
"""Messages that hold one of several values: the oneof, and what its fields are."""

PLACES: Mapping[type, tuple[Any, str]] = {
    **{cls: (make, "") for cls, make in WHOLE.items()},
    **{cls: (make, name) for make, (_, held) in ONE_OF.items() for name, cls in held.items()},
}
"""The message that a value is, or is held by in the field of that name."""


def _write_prompt(prompt: Prompt) -> Mapping[str, Any]:
    match prompt:
        case str():
            return {"text": prompt}
        case Chat():
            turns = [{"role": role, "content": content} for role, content in prompt.messages]
            return {"chat": {"messages": turns}}
        case _:
            return {"token_ids": {"ids": prompt}}


def _read_prompt(message: generation_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "chat":
            return Chat(tuple((turn.role, turn.content) for turn in message.chat.messages))
        case _:
            raise InvalidArgumentError("prompt: set one of text, token_ids, chat")


def _decisions(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Of a match nothing more is said: the target's token is the drafted one."""
    exact = Decision(Outcome.EXACT)
    match_ = encode(exact)

    def write(decision: Decision) -> Mapping[str, Any]:
        return match_ if decision.outcome is Outcome.EXACT else encode(decision)

    def read(message: verify_pb2.Decision) -> Any:
        return exact if message.outcome == verify_pb2.DECISION_OUTCOME_EXACT else decode(message)

    return write, read


def _chunks(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
    """Every token has its origin, and its distribution if one has."""

    def read(message: draft_pb2.DraftResponse) -> Any:
        count = len(message.token_ids)
        for name, sizes in (("origins", (count,)), ("distributions", (0, count))):
            if (size := len(getattr(message, name))) not in sizes:
                raise InvalidArgumentError(f"DraftResponse.{name}: {size} for {count} token_ids")
        return decode(message)

    return encode, read


CODEC = Codec(
    Exceptions(
        hooks={
            (generation.GenerationRequest, "prompt"): Hook(
                ("text", "token_ids", "chat"), _write_prompt, _read_prompt
            ),
            (rounds.VerifyRound, "max_plain_tokens"): Hook(
                ("max_plain_tokens",),
                lambda count: {"max_plain_tokens": count},
                lambda message: max(1, message.max_plain_tokens),
            ),
        },
        local={
            generation.GenerateOptions: ("timeout_s", "request_id", "traceparent"),
            admin.TokenizerBundle: ("tokenizer_json",),
            rounds.Verdict: ("start_length",),
        },
        prefixes={rounds.Budget: "remaining_"},
        around={Decision: _decisions, DraftChunk: _chunks},
        called={"Rule": "rule"},
    )
)
