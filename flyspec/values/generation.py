"""What clients ask for and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Annotated

from flyspec.flags import UINT32, UINT64, Flag
from flyspec.ranges import Range
from flyspec.rules import Rule
from flyspec.speculation_length import SpeculationLength, read_speculation_length
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import Budget, Decision, DraftCounts, OpenWindow
from flyspec.values.tokens import (
    MAX_TOP_LOGPROBS,
    Origin,
    SamplingParams,
    TokenLogprobs,
    sampling_flag,
)

SERVERS = "set by the server"
"""How help shows the default of what is left to the server."""
_speculation = partial(Flag, group="Speculation")


class FinishReason(IntEnum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2


class RecoveryKind(IntEnum):
    """What kept a generation going when a service failed, or was taken from it."""

    TARGET_REOPENED = 1
    DRAFTER_REOPENED = 2
    DRAFTER_REPLACED = 3
    DRAFTER_FALLBACK = 4
    DRAFTER_RESTORED = 5
    DRAFTER_SWAPPED = 6


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat of (role, content) as a prompt; the target's template renders it."""

    messages: Sequence[tuple[str, str]]

    @classmethod
    def of_user(cls, content: str) -> Chat:
        """A chat of one message of a user."""
        return cls((("user", content),))


Prompt = str | Sequence[int] | Chat


# fmt: off
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to generate; the fields of `GenerateRequest`. None leaves it to the server.

    `num_draft_tokens_per_round` are those of an earlier `Completion`, to repeat it. `eager` streams
    tokens before they are final, and `Retract` when they did not stand;
    `return_rounds` a `RoundRecord` for every round. `request_id`, 1 to 128 letters, digits and
    `._:@/+=-`, is the request's in logs and traces, and `traceparent` (W3C) the span that waits for
    it; they go as metadata, and empty ones not at all.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: Annotated[int | None, sampling_flag(
        "Random seed (default: chosen and reported).", UINT64,
    )] = None
    max_tokens: Annotated[int | None, Flag("Maximum output tokens.", Range(1, UINT32.high))] = None
    stop: Annotated[Sequence[str], sampling_flag("Text that ends the output; repeatable.")] = ()
    ignore_eos: Annotated[bool, sampling_flag("Keep generating past end of sequence.")] = False
    drafter: Annotated[str, _speculation(
        "Drafter: model, prompt_lookup, multi_level or the name of a registered one.",
        default=SERVERS,
    )] = ""
    rule: Rule | None = None
    num_speculative_tokens: Annotated[SpeculationLength | None, _speculation(
        "K: maximum drafted tokens per round (0: plain decoding), or auto to adapt it each round.",
        UINT32, default=SERVERS, metavar="INTEGER|auto", read=read_speculation_length,
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
    logprobs: Annotated[int | None, sampling_flag(
        "With --json: report the target's log-probabilities of each token and of this many most "
        f"likely ones, 0 to {MAX_TOP_LOGPROBS}.", Range(0, MAX_TOP_LOGPROBS),
    )] = None
    return_rounds: Annotated[bool, Flag(
        "With --json: report each round's drafts and decisions, for replaying the run.",
    )] = False
    timeout_s: Annotated[float | None, Flag(
        "Time limit per request in seconds, queueing included.",
        name="--timeout", default="no limit",
    )] = None
    request_id: str = ""
    traceparent: str = ""
    # fmt: on


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to continue it."""

    prompt: Prompt
    options: GenerateOptions = field(default_factory=GenerateOptions)


@dataclass(frozen=True, slots=True)
class Started:
    """The generation was admitted; `rule` has every parameter set.

    `num_speculative_tokens` is the most that a round may draft if K is `adaptive`. `warnings` say
    in words what the caller should know about the parameters.
    """

    request_id: str
    model: str
    drafter: str
    seed: int
    prompt_token_ids: Sequence[int]
    rule: Rule
    num_speculative_tokens: int
    warnings: Sequence[str] = ()
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens, where each came from, and the text that became complete with each.

    They are final, unless the request was `eager`: then `num_final_tokens` of the output's tokens
    are. `loose_gaps_nats` has one a LOOSE token, in order; `logprobs` one a token, if asked for.
    """

    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    token_texts: Sequence[str] = ()
    num_final_tokens: int = 0
    loose_gaps_nats: Sequence[float] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Retract:
    """Tokens sent before they were final did not stand: only with `eager`.

    What remains of the output: its first `output_token_index` tokens, and of its text the first
    `text_byte_offset` bytes in UTF-8.
    """

    output_token_index: int
    text_byte_offset: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was judged; see the proto message `GenerationRound`.

    With the sequence before it, all that the verdict depended on.
    """

    start_length: int
    drafter: str
    draft_token_ids: Sequence[int]
    decisions: Sequence[Decision]
    keep_length: int
    next_token_id: int
    committed_length: int
    budget: Budget = field(default_factory=Budget)
    exact_until_position: int = 0
    open_window: OpenWindow | None = None
    num_speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """What kept a generation going when a service failed, or was taken from it. Times in ns."""

    kind: RecoveryKind
    output_token_index: int
    elapsed_ns: int
    delay_ns: int
    successor: str
    reason: str


@dataclass(slots=True)
class DrafterShare(DraftCounts):
    """What a drafter did for a generation."""

    drafter: str = ""


@dataclass(slots=True)
class SpeculationMetrics(DraftCounts):
    """What speculation did in one request (see the proto message of this name).

    Loose tokens and their cost count once they are final, accepted drafts of a round once no window
    can drop them. Bytes are those of the rounds' messages before HTTP/2's framing: of messages that
    had to be sent again, again; of those that open sessions, none.
    """

    num_loose_tokens: int = 0
    loose_cost_nats: float = 0.0
    num_rollbacks: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_rejected_tokens: int = 0
    rejected_cost_nats: float = 0.0
    round_bytes: int = 0
    distribution_bytes: int = 0
    num_plain_tokens: int = 0
    num_plain_bursts: int = 0
    num_drafter_stops: int = 0
    num_scored_tokens: int = 0
    num_agreed_tokens: int = 0
    saved_ns: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a round with drafts; 1 when nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def mean_loose_gap_nats(self) -> float | None:
        """Mean log p(most likely) - log p(token) of loosely accepted tokens; None without any."""
        return self.loose_cost_nats / self.num_loose_tokens if self.num_loose_tokens else None

    @property
    def mean_rejected_gap_nats(self) -> float | None:
        """The same of the mismatches that were not accepted; None without any."""
        count = self.num_rejected_tokens
        return self.rejected_cost_nats / count if count else None

    def settle(self, num_accepted: int) -> None:
        """Count the accepted drafts of a round that is final."""
        histogram = self.acceptance_histogram
        histogram += [0] * (num_accepted + 1 - len(histogram))
        histogram[num_accepted] += 1
        self.num_accepted_draft_tokens += num_accepted

    def count_bytes(self, num_bytes: int, distribution_bytes: int = 0) -> None:
        """Count a round's message, so much of it distributions."""
        self.round_bytes += num_bytes
        self.distribution_bytes += distribution_bytes


@dataclass(slots=True)
class GenerationTimings:
    """Where the time of one request went, ns (see the proto message of this name).

    A round's overhead is what of its time is outside both models; of one round, there is none: the
    first also opens the sessions and reads the prompt.
    """

    time_to_first_token_ns: int = 0
    total_ns: int = 0
    draft_model_ns: int = 0
    target_model_ns: int = 0
    round_overhead_p50_ns: int = 0
    queue_ns: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The generation ended.

    `loop_guard_token_index`: tokens of the output after which the rest was judged exactly because
    it had begun to repeat itself; None if it had not. `recoveries` are the first of
    `num_recoveries`, in order; `drafters` those that drafted, in order of appearance.
    `num_draft_tokens_per_round` are the drafts that were checked, 0 for a token of plain decoding
    and for a window that failed for want of drafts. `mixed_numerics`: targets that compute
    differently had a part in it, so it may not be what one of them decodes (`exact` included).
    """

    finish_reason: FinishReason
    stop_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationMetrics
    timings: GenerationTimings
    loop_guard_token_index: int | None = None
    recoveries: Sequence[Recovery] = ()
    num_recoveries: int = 0
    drafters: Sequence[DrafterShare] = ()
    num_draft_tokens_per_round: Sequence[int] = ()
    mixed_numerics: bool = False


Event = Started | Chunk | Retract | RoundRecord | Completion


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation; `chunks` hold its final tokens, those taken back left out.

    `rounds` are there if they were asked for.
    """

    started: Started
    chunks: Sequence[Chunk]
    completion: Completion
    rounds: Sequence[RoundRecord] = ()

    @property
    def text(self) -> str:
        """The output."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """The output's tokens."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def origins(self) -> list[Origin]:
        """Where each token came from."""
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def loose_gaps_nats(self) -> list[float]:
        """What each LOOSE token cost, in order: log p(most likely) - log p(token), raw logits."""
        return [gap for chunk in self.chunks for gap in chunk.loose_gaps_nats]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The target's log-probabilities at each token; empty if not asked for."""
        return [entry for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def mean_accepted_tokens(self) -> float:
        """τ_acc: emitted tokens a round."""
        return self.completion.completion_tokens / max(1, self.completion.speculation.num_rounds)


@dataclass(frozen=True, slots=True)
class Models:
    """What answers at an address. The default of drafters and rules comes first."""

    target: ModelInfo
    drafters: tuple[str, ...]
    rules: tuple[str, ...]
