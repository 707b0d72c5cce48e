"""Arguments of callers: prompts, options as keywords, retries."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from numbers import Real
from typing import Any, TypedDict

from flyspec.errors import (
    FlyspecError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength
from flyspec.values.chat import Chat, Message
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerateOptions, Prompt
from flyspec.values.tokens import SamplingParams

AnyPrompt = str | Sequence[int] | Sequence[Message] | Chat
"""A text, token ids, or the messages of a chat."""
FIRST_REST_S, LONGEST_REST_S = 0.5, 60.0
"""Seconds before the first retry, doubled with each, and the longest wait that a server may ask
for."""


class GenerateKeywords(TypedDict, total=False):
    """The fields of `GenerateOptions` and `SamplingParams` as keywords; a rule also by its name.

    In phases, too, where one text may be given instead of several that end it.
    """

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
    phases: Sequence[Phase]
    exact_inside: Sequence[str]
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
    return_draft_distributions: bool
    timeout_s: float | None
    request_id: str
    traceparent: str


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_KNOWN = frozenset(GenerateKeywords.__annotations__)


def prompt_of(prompt: AnyPrompt) -> Prompt:
    """Return a prompt as it is sent: messages are a chat. Raises `InvalidArgumentError`."""
    given: Any = prompt  # an untyped caller's
    if isinstance(given, str | Chat):
        return given
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise InvalidArgumentError(
            f"prompt: must be a text, token ids or the messages of a chat, got {shown(given)}"
        )
    return Chat(given) if given and isinstance(given[0], Mapping) else given


def options_of(options: GenerateOptions | None, keywords: Mapping[str, Any]) -> GenerateOptions:
    """Return `options` with the keywords in their places. Raises `InvalidArgumentError`."""
    if unknown := keywords.keys() - _KNOWN:
        name = min(unknown)
        near = difflib.get_close_matches(name, _KNOWN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidArgumentError(f"{name}: there is no such option{hint}")
    base: Any = GenerateOptions() if options is None else options
    if not isinstance(base, GenerateOptions):
        raise InvalidArgumentError(f"options: must be GenerateOptions, got {shown(base)}")
    given: dict[str, Any] = {"rule": base.rule, "stop": base.stop, **keywords}
    if isinstance(given["rule"], str):
        given["rule"] = Rule(given["rule"])
    phases = given.get("phases", base.phases)
    if isinstance(phases, list | tuple):
        given["phases"] = tuple(map(_phase_of, phases))
    if isinstance(given["stop"], str):
        given["stop"] = (given["stop"],)
    if isinstance(biases := given.get("logit_bias"), Mapping):
        given["logit_bias"] = tuple(biases.items())
        with suppress(TypeError):  # of keys that cannot be sent either
            given["logit_bias"] = tuple(sorted(biases.items()))
    if sampling := {name: given.pop(name) for name in _SAMPLING & given.keys()}:
        given["sampling"] = replace(base.sampling, **sampling)
    return replace(base, **given)


def _phase_of(phase: Any) -> Any:
    """Return a phase with a rule by name, or one text as it ends, in the form that is sent."""
    if not isinstance(phase, Phase):
        return phase  # refused when it is sent
    rule: Any = phase.rule
    if isinstance(rule, str):
        phase = replace(phase, rule=Rule(rule))
    return replace(phase, until=(phase.until,)) if isinstance(phase.until, str) else phase


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a wrong value as errors show it."""
    return f"{value!r:.200}"


class Retries:
    """Policy for sending a request again: the server is full, or cannot be reached.

    At most `max_retries` times; for up to `patience_s` seconds also more often if it is full.
    Raises `InvalidArgumentError`.
    """

    def __init__(self, max_retries: int, patience_s: float = 0.0) -> None:
        if not is_number(patience_s):
            raise InvalidArgumentError(f"patience_s: must be a number, got {shown(patience_s)}")
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
