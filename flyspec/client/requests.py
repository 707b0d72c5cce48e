"""What clients give and what is sent: prompts, options as keywords, retries."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from flyspec import wire
from flyspec.client.messages import metadata_of, misfit
from flyspec.errors import (
    FlyspecError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.values.chat import Chat, Message
from flyspec.values.generation import GenerateOptions, GenerationRequest, Prompt
from flyspec.values.tokens import SamplingParams

AnyPrompt = str | Sequence[int] | Sequence[Message] | Chat
"""A text, token ids, or the messages of a chat."""
FIRST_REST_S, LONGEST_REST_S = 0.5, 60.0
"""Seconds before the first retry, doubled with each, and the longest wait that a server may ask
for."""


class GenerateKeywords(TypedDict, total=False):
    """The fields of `GenerateOptions` and `SamplingParams` as keywords; a rule also by its name."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    min_tokens: int
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    drafter: str
    rule: Rule | str | None
    num_speculative_tokens: SpeculationLength | None
    num_draft_tokens_per_round: Sequence[int]
    max_loose_tokens: int | None
    max_loose_cost_nats: float | None
    exact_prefix_tokens: int
    eager: bool
    disable_loop_guard: bool
    prediction: str | Sequence[int]
    logprobs: int | None
    return_rounds: bool
    timeout_s: float | None
    request_id: str
    traceparent: str


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_KNOWN = frozenset(GenerateKeywords.__annotations__)


def prompt_of(prompt: AnyPrompt) -> Prompt:
    """Return a prompt as it is sent: a list of messages is a chat."""
    if not isinstance(prompt, str | Chat) and prompt and isinstance(prompt[0], Mapping):
        return Chat(prompt)  # type: ignore[arg-type]
    return prompt  # type: ignore[return-value]


def options_of(options: GenerateOptions | None, keywords: Mapping[str, Any]) -> GenerateOptions:
    """Return `options` with the keywords in their places. Raises `InvalidArgumentError`."""
    if unknown := keywords.keys() - _KNOWN:
        name = min(unknown)
        near = difflib.get_close_matches(name, _KNOWN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidArgumentError(f"{name}: there is no such option{hint}")
    options, given = options or GenerateOptions(), dict(keywords)
    if isinstance(given.get("rule"), str):
        given["rule"] = Rule(given["rule"])
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = tuple(sorted(given["logit_bias"].items()))
    sampling = {name: given.pop(name) for name in _SAMPLING & given.keys()}
    return replace(options, **given, sampling=replace(options.sampling, **sampling))


def encoded(prompt: Prompt, options: GenerateOptions) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """Return a request's message and metadata. Raises `InvalidArgumentError`."""
    if options.timeout_s is not None and not options.timeout_s > 0:
        raise InvalidArgumentError(f"timeout_s must be more than 0, got {options.timeout_s:g}")
    try:
        message = wire.encode(GenerationRequest(prompt, options))
    except (ValueError, TypeError) as error:  # such as protobuf's for -1 in an unsigned field
        reason = misfit(prompt, options)
        raise InvalidArgumentError(reason or f"the request cannot be sent: {error}") from None
    return message, metadata_of(options)


class Retries:
    """When to send a request again: the server is full, or cannot be reached.

    At most `max_retries` times; for up to `patience_s` seconds also more often if it is full.
    """

    def __init__(self, max_retries: int, patience_s: float = 0.0) -> None:
        self._left, self._until = max_retries, time.monotonic() + patience_s
        self._rest_s = FIRST_REST_S

    def rest_s(self, error: FlyspecError) -> float:
        """Return the seconds to wait before the next try. Raises the error if there is none."""
        if isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
            if time.monotonic() + error.retry_after_s <= self._until:
                return error.retry_after_s
            rest_s = error.retry_after_s
        elif isinstance(error, UnavailableError):
            rest_s, self._rest_s = self._rest_s, 2 * self._rest_s
        else:
            raise error
        if self._left <= 0 or rest_s > LONGEST_REST_S:
            raise error
        self._left -= 1
        return rest_s
