"""OpenAI's API, as far as load tests speak it: requests, events, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from flyspec.v1 import generation_pb2
from flyspec.values.admin import ModelInfo
from flyspec.values.generation import Recovery, RecoveryKind
from flyspec.values.requests import GenerationRequest
from flyspec.values.tokens import SamplingParams
from loadtest.transport import SlotTaken, StreamEnd

ERRORS: Mapping[int, type[FlyspecError]] = {
    400: InvalidArgumentError,
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: StateError,
    413: InvalidArgumentError,
    429: ResourceExhaustedError,
    501: UnimplementedError,
    502: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
"""By HTTP code; others are plain `FlyspecError`s."""
_BY_STATUS = {cls.status.lower(): cls for cls in ERRORS.values()}
SAME = frozenset(("seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos"))
"""Options that are parameters of the same name."""
OF_THE_CALL = frozenset(("timeout_s", "request_id", "traceparent"))
"""Options that are not in the body."""
# Text over HTTP cannot be retracted.
_SPECULATION = frozenset(generation_pb2.Speculation.DESCRIPTOR.fields_by_name) - {"eager"}
_ASKED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
_DONE = b"[DONE]"


def request_of(prompt: Prompt, options: GenerateOptions) -> tuple[str, bytes]:
    """Return the path and body. Raises `ConfigError`, naming an option that HTTP cannot carry."""
    chat = isinstance(prompt, Chat)
    body: dict[str, Any] = {**_ASKED}
    for name, value in _changed(options, GenerateOptions()).items():
        if name in SAME:
            body[name] = value
        elif name in _SPECULATION:
            message = wire.encode(GenerationRequest("", options)).speculation
            body["speculation"] = json_format.MessageToDict(message)
        elif name == "sampling":
            body |= _changed(value, SamplingParams())
            if value.logit_bias:
                body["logit_bias"] = {str(token): bias for token, bias in value.logit_bias}
        elif name == "logprobs":
            body |= {"logprobs": True, "top_logprobs": value} if chat else {"logprobs": value}
        elif name == "prediction" and chat and isinstance(value, str):
            body["prediction"] = {"type": "content", "content": value}
        elif name not in OF_THE_CALL:
            raise ConfigError(f"{name}: HTTP cannot carry {value!r:.40}; use --protocol grpc")
    if isinstance(prompt, Chat):
        given = _changed(prompt, Chat(()))
        if "template_kwargs" in given:
            given["chat_template_kwargs"] = given.pop("template_kwargs")
        return "/v1/chat/completions", json.dumps(given | body).encode()
    if options.max_tokens is None:
        raise ConfigError("max_tokens: completions over HTTP need one; use --protocol grpc")
    body["prompt"] = prompt if isinstance(prompt, str) else [*prompt]
    return "/v1/completions", json.dumps(body).encode()


def pieces_of(event: bytes) -> Iterator[SlotTaken | Sequence[int] | StreamEnd]:
    """Yield what an event of a stream says. Raises `FlyspecError` for an error, or no JSON."""
    data = event.removeprefix(b"data:").strip()
    if data == _DONE:
        return
    document = _parsed(data)
    if error := document.get("error"):
        raise _BY_STATUS.get(error.get("code"), FlyspecError)(str(error.get("message")))
    for choice in document.get("choices", ()):
        if choice.get("delta", {}).get("role"):
            yield SlotTaken()
        elif token_ids := choice.get("token_ids"):
            yield token_ids
    if usage := document.get("usage"):
        counts = document.get("metrics", {}).get("speculative_decoding", {})
        rounds = counts.get("num_spec_steps", 0) + counts.get("num_plain_tokens", 0)
        recoveries = [
            Recovery(**told | {"kind": RecoveryKind[told["kind"]]})
            for told in document.get("recoveries", ())
        ]
        yield StreamEnd(usage["completion_tokens"], rounds, recoveries)


def error_of_response(code: int, retry_after: Any, body: bytes) -> FlyspecError:
    """Return the error that a response stands for; `retry_after` is that header's value."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:200].decode(errors="replace").strip() or "no message"
    found = ERRORS.get(code)
    if found is None:
        return FlyspecError(f"HTTP {code}: {message}")
    if found is ResourceExhaustedError and str(retry_after).isdecimal():
        return ResourceExhaustedError(message, float(retry_after))
    return found(message)


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


def _changed(value: Any, default: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: v for name, v in given.items() if v != getattr(default, name)}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise FlyspecError(f"not a JSON object: {data[:100]!r}")
    return document
