"""Requests of clients: prompts, options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec.drafter_names import KINDS_LISTED
from flyspec.flags import UINT32, UINT64, Flag, flags_of
from flyspec.ranges import Range
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength, read_speculation_length
from flyspec.values.chat import Chat
from flyspec.values.phases import EXACT_INSIDE, Phase
from flyspec.values.tokens import MAX_TOP_LOGPROBS, SamplingParams, sampling_flag

SERVERS = "set by the server"
"""Default in help texts."""
_speculation = partial(Flag, group="Speculation")


def read_prediction(path: str) -> str:
    """Return a file's text; empty without a path. Raises `ValueError`."""
    try:
        return Path(path).read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list."""
    return tuple(filter(None, map(str.strip, text.split(","))))


Prompt = str | Sequence[int] | Chat


# fmt: off
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of a generation; fields of `GenerateRequest`. None: the server's default.

    `prediction` is text, or token ids, that the output is expected to resemble, to draft from.
    `phases` are segments of the output with rules and budgets of their own, on top of the budgets
    here; those without a rule have `rule`. `exact_inside` names what is judged exactly in any
    phase: `tool_call`, `json`. `num_draft_tokens_per_round` is from an earlier `Completion`, to
    reproduce it. `eager` streams tokens before they are final, and `Retract` if they are then
    dropped; `return_rounds` streams a `RoundRecord` per round, with `return_draft_distributions`
    with what the drafts were drawn from where the rule needs it. `request_id` (1 to 128 letters,
    digits and `._:@/+=-`) identifies the request in logs and traces, `traceparent` (W3C) is the
    caller's span; both are sent as metadata unless empty.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: Annotated[int | None, sampling_flag(
        "Random seed (default: chosen and reported).", UINT64,
    )] = None
    max_tokens: Annotated[int | None, Flag("Maximum output tokens.", Range(1, UINT32.high))] = None
    stop: Annotated[Sequence[str], sampling_flag("Text that ends the output; repeatable.")] = ()
    stop_token_ids: Annotated[Sequence[int], sampling_flag(
        "Token that ends the output like an end of sequence; repeatable.",
    )] = ()
    ignore_eos: Annotated[bool, sampling_flag("Keep generating past end of sequence.")] = False
    drafter: Annotated[str, _speculation(
        f"Drafter: {KINDS_LISTED}, or the name of a head or a registered one.",
        default=SERVERS,
    )] = ""
    rule: Rule | None = None
    phases: Sequence[Phase] = ()
    exact_inside: Annotated[Sequence[str], _speculation(
        f"Decode exactly inside of these, whatever the rule: {', '.join(EXACT_INSIDE)}; several "
        "with commas between them.", default="nothing", metavar="KINDS", read=read_names,
        listed=True,
    )] = ()
    num_speculative_tokens: Annotated[SpeculationLength | None, _speculation(
        "K: maximum drafted tokens per round (0: plain decoding), or auto to adapt it each round.",
        UINT32, default=SERVERS, metavar="<int|auto>", read=read_speculation_length,
    )] = None
    num_draft_tokens_per_round: Sequence[int] = ()
    max_loose_tokens: Annotated[int | None, _speculation(
        "Maximum loosely accepted tokens; decoding is exact after that.", UINT32,
        default="no limit",
    )] = None
    max_loose_cost_nats: Annotated[float | None, _speculation(
        "Maximum total cost of loosely accepted tokens, in nats; decoding is exact after that.",
        default="no limit",
    )] = None
    exact_prefix_tokens: Annotated[int, _speculation(
        "Decode this many tokens exactly before the rule applies.", UINT32,
    )] = 0
    eager: Annotated[bool, _speculation(
        "Show tokens before they are final. A terminal redraws retracted ones; a file or pipe "
        "still gets only final text.",
    )] = False
    disable_loop_guard: Annotated[bool, _speculation(
        "Do not switch to exact decoding when the output starts to repeat itself.",
        name="--no-loop-guard",
    )] = False
    prediction: Annotated[str | Sequence[int], _speculation(
        "File with the text that the output is expected to resemble, to draft from.",
        name="--prediction-file", metavar="FILE", read=read_prediction,
    )] = ""
    logprobs: Annotated[int | None, sampling_flag(
        "With --json: report the target's log-probabilities of each token and of this many most "
        f"likely ones, 0 to {MAX_TOP_LOGPROBS}.", Range(0, MAX_TOP_LOGPROBS),
    )] = None
    return_rounds: Annotated[bool, Flag(
        "With --json: report each round's drafts and decisions, for replaying the run.",
    )] = False
    return_draft_distributions: bool = False
    timeout_s: Annotated[float | None, Flag(
        "Time limit per request in seconds, queueing included.",
        name="--timeout", default="no limit",
    )] = None
    request_id: str = ""
    traceparent: str = ""
    # fmt: on


def request_flag(name: str, **changes: Any) -> Flag:
    """Return the flag of a request's option, with changes."""
    _, flag = {**flags_of(GenerateOptions), **flags_of(SamplingParams)}[name]
    return replace(flag, **changes)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and options."""

    prompt: Prompt
    options: GenerateOptions = field(default_factory=GenerateOptions)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A text to score; `logprobs` most likely tokens at each position are wanted as well."""

    prompt: Prompt
    logprobs: int = 0
