"""The part of OpenAI's API that load tests speak: requests, events, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf import json_format

from flyspec import wire
from flyspec.client import Chat, GenerateOptions, Models, Prompt
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    FlyspecError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StateError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.values.admin import ModelInfo
from flyspec.values.generation import Recovery, RecoveryKind
from flyspec.values.requests import GenerationRequest
from loadtest.transport import StreamEnd

BY_STATUS = {
    error.status.lower(): error
    for error in (
        DeadlineExceededError, InvalidArgumentError, NotFoundError, PermissionDeniedError,
        ResourceExhaustedError, StateError, UnauthenticatedError, UnavailableError,
        UnimplementedError,
    )
}  # fmt: skip
"""Errors by the code in a body; others are plain `FlyspecError`s."""
_SENT = frozenset(
    ("sampling", "seed", "max_tokens", "ignore_eos", "drafter", "rule", "num_speculative_tokens",
     "logprobs", "timeout_s")
)  # fmt: skip
_ASKED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
_DONE = b"[DONE]"


def request_of(prompt: Prompt, options: GenerateOptions) -> tuple[str, bytes]:
    """Return the path and body. Raises `ConfigError`, naming an option that is not sent."""
    default, chat = GenerateOptions(), isinstance(prompt, Chat)
    for name in (field.name for field in fields(options) if field.name not in _SENT):
        if getattr(options, name) != getattr(default, name):
            raise ConfigError(f"{name}: load tests over HTTP have none; use --protocol grpc")
    speculation = wire.encode(GenerationRequest("", options)).speculation
    body: dict[str, Any] = {
        **_ASKED, "seed": options.seed, "max_tokens": options.max_tokens,
        "ignore_eos": options.ignore_eos, "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p, "speculation": json_format.MessageToDict(speculation),
    }  # fmt: skip
    if options.logprobs is not None:
        count = options.logprobs
        body |= {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}
    if isinstance(prompt, Chat):
        body["messages"] = prompt.messages
    else:
        body["prompt"] = prompt if isinstance(prompt, str) else [*prompt]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    given = {name: value for name, value in body.items() if value is not None}
    return path, json.dumps(given).encode()


def pieces_of(event: bytes) -> Iterator[Sequence[int] | StreamEnd]:
    """Yield the tokens of an event, or the end. Raises `FlyspecError` for an error, or no JSON."""
    data = event.removeprefix(b"data:").strip()
    if data == _DONE:
        return
    document = _parsed(data)
    if error := document.get("error"):
        raise BY_STATUS.get(error.get("code"), FlyspecError)(str(error.get("message")))
    for choice in document.get("choices", ()):
        if token_ids := choice.get("token_ids"):
            yield token_ids
    if usage := document.get("usage"):
        counts = document.get("metrics", {}).get("speculative_decoding", {})
        rounds = counts.get("num_spec_steps", 0) + counts.get("num_plain_tokens", 0)
        recoveries = [
            Recovery(**told | {"kind": RecoveryKind[told["kind"]]})
            for told in document.get("recoveries", ())
        ]
        yield StreamEnd(usage["completion_tokens"], rounds, recoveries)


def error_of_response(status: int, retry_after: Any, body: bytes) -> FlyspecError:
    """Return the error that a response stands for; `retry_after` is that header's value."""
    try:
        error = json.loads(body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = body[:200].decode(errors="replace").strip() or "no message", None
    if status == 429:
        seconds = float(retry_after) if str(retry_after).isdecimal() else None
        return ResourceExhaustedError(message, seconds)
    found = BY_STATUS.get(code, FlyspecError)
    return found(message if found is not FlyspecError else f"HTTP {status}: {message}")


def models_of(body: bytes) -> Models:
    """Return the models in a list; what it does not say is empty or 0. Raises `FlyspecError`."""
    try:
        first, *_ = models = _parsed(body)["data"]
        ids = [model["id"] for model in models]
        name, length = first.get("root", ids[0]), first.get("max_model_len", 0)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FlyspecError(f"/v1/models: not a list of models: {error!r}") from None
    rules = tuple(i.removeprefix(f"{name}:") for i in ids if i.startswith(f"{name}:"))
    return Models(ModelInfo(name, "", 0, length), (), rules)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise FlyspecError(f"not a JSON object: {data[:100]!r}")
    return document
