"""What the orchestrator and the services tell each other about a round. Times in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from flyspec.rules import Rule
from flyspec.values.sessions import SessionStatus
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution, TokenLogprobs

MAX_SCORED = 64
"""Most appended tokens that a drafter is asked about."""


class Outcome(IntEnum):
    """What a verdict says of one drafted token."""

    EXACT = 1
    LOOSE = 2
    PROVISIONAL = 3
    REJECTED = 4
    NOT_REACHED = 5

    @property
    def accepted(self) -> bool:
        """Whether the drafted token stands, if only for now."""
        return self <= Outcome.PROVISIONAL


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still be accepted loosely; `None` is without bound."""

    loose_tokens: int | None = None
    loose_cost_nats: float | None = None


class Decision(NamedTuple):
    """What is said of one drafted token.

    `target_token_id` is the target's own token there. `entropy` is in the rule's measure and set
    where the rule looked, `measure` likewise for a rule that goes by something else; `gap_nats` =
    raw logp(most likely) - logp(drafted), set at mismatches. Of a token that was not reached,
    `target_token_id` may be missing.
    """

    outcome: Outcome
    target_token_id: int | None = None
    entropy: float | None = None
    gap_nats: float | None = None
    measure: float | None = None


class OpenWindow(NamedTuple):
    """A loosely accepted token at absolute `position` whose window is not closed yet.

    `remaining_matches` >= 1 drafted positions must still match; if one does not, the sequence goes
    back to `position` and `target_token_id` takes the token's place.
    """

    position: int
    target_token_id: int
    remaining_matches: int
    gap_nats: float
    target_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class DistributionSpec:
    """Which distributions a drafter sends: its `top_k` most likely tokens, 0 for all.

    `draw_from_it`: it draws from what it sends, with noise of its own (the rule `rejection`).
    `raw`: of the model's raw logits instead of the processed ones (`fuzzy-reference`).
    """

    top_k: int = 0
    draw_from_it: bool = False
    raw: bool = False


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Opens a draft session with the sequence so far, `prompt_length` of it the prompt (0: all).

    `tokenizer_fingerprint` is that of the ids' tokenizer; empty: the drafter's own.
    `drafter_vocab_size` does not travel: how many ids the drafter has, for who checks its answers;
    0 where nobody knows.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    drafter: str = ""
    prompt_length: int = 0
    distribution: DistributionSpec | None = None
    tokenizer_fingerprint: str = ""
    drafter_vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class DraftAdvance:
    """Keep `keep_length` tokens, append `append_token_ids`, propose up to `max_tokens`.

    The proposal ends behind the token with which its probability, by the drafter's own reckoning,
    falls below `min_confidence`. `score`: say of each appended token whether the drafter would have
    proposed it. `traceparent` is that of the span that waits for it; empty if the request is not
    traced.
    """

    round_id: int
    keep_length: int
    append_token_ids: Sequence[int]
    max_tokens: int
    traceparent: str = ""
    min_confidence: float = 0.0
    score: bool = False


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Times of one proposal inside the draft service, ns."""

    queue_ns: int = 0
    model_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """Drafted tokens, possibly none: a piece of a proposal on its way, or all that was `joined`.

    `keep_length` and `next_token_id` are what the proposal builds on, `start_position` is that of
    the first token. `distributions` has one a token if they were asked for, `confidences` where the
    drafter knows how probable it held the tokens; `agreements` one an appended token if they were
    to be scored and can be. What `drafter` made it, by name, and when it was there, as
    `perf_counter_ns` counts, whoever asked notes here; and if it was drafted `ahead`, while the
    proposal before it was checked.
    """

    round_id: int = 0
    keep_length: int = 0
    next_token_id: int = 0
    start_position: int = 0
    token_ids: Sequence[int] = field(default_factory=list)
    origins: Sequence[Origin] = field(default_factory=list)
    last: bool = True
    timings: DraftTimings = field(default_factory=DraftTimings)
    distributions: Sequence[TokenDistribution] = ()
    confidences: Sequence[float] = ()
    agreements: Sequence[bool] = ()
    drafter: str = ""
    arrived_ns: int = 0
    ahead: bool = False

    def joined(self, more: DraftChunk) -> DraftChunk:
        """This and the piece that follows it as one."""
        return replace(
            more,
            start_position=self.start_position,
            token_ids=[*self.token_ids, *more.token_ids],
            origins=[*self.origins, *more.origins],
            distributions=(*self.distributions, *more.distributions),
            confidences=(*self.confidences, *more.confidences),
            agreements=(*self.agreements, *more.agreements),
        )

    def cut(self, first: int, end: int) -> DraftChunk:
        """Its tokens `first` to `end`, as if only those had been proposed."""
        return replace(
            self,
            start_position=self.start_position + first,
            token_ids=self.token_ids[first:end],
            origins=self.origins[first:end],
            distributions=self.distributions[first:end],
            confidences=self.confidences[first:end],
        )


@dataclass(slots=True)
class DraftCounts:
    """Rounds with drafts, and what became of those; who runs the rounds counts in it."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that was accepted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round with drafts."""
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted


@dataclass(frozen=True, slots=True)
class VerifyOpen:
    """Opens a verify session with the sequence so far, `prompt_length` of it the prompt.

    `logprobs` is the number of most likely tokens to tell the log-probabilities of; None tells none
    at all. `waited_ms` is how long its request has waited; None: it does not wait for a slot.
    `weights_fingerprint` and `numerics` are those that a model must have; empty: any.
    """

    token_ids: Sequence[int]
    prompt_length: int
    rule: Rule
    sampling: SamplingParams
    seed: int
    logprobs: int | None = None
    waited_ms: int | None = None
    orchestrator_id: str = ""
    weights_fingerprint: str = ""
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """Distributions of drafts of a round, from absolute `first_position` on."""

    round_id: int
    first_position: int
    distributions: Sequence[TokenDistribution]


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """Keep, append, then judge the drafts; without drafts, decode up to `max_plain_tokens`.

    `draft_survivals`, one a draft or none, are the chances that it is reached and accepted; of a
    step that is too full the least likely drafts are left out. More than `num_speculative_tokens`
    drafts are judged as several rounds of so many; 0: all as one. `traceparent` is that of the span
    that waits for the verdict; empty if it is not traced. `return_plain_confidence` asks verdicts
    for that.
    """

    round_id: int
    keep_length: int
    append_token_ids: Sequence[int]
    draft_token_ids: Sequence[int]
    prefix_hash: int = 0
    max_plain_tokens: int = 1
    budget: Budget = field(default_factory=Budget)
    exact_until_position: int = 0
    open_window: OpenWindow | None = None
    traceparent: str = ""
    draft_survivals: Sequence[float] = ()
    num_speculative_tokens: int = 0
    return_plain_confidence: bool = False


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Times of one verdict inside the verify service, ns."""

    queue_ns: int = 0
    forward_ns: int = 0
    judge_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of a round: the sequence is `keep_length` tokens, then `next_token_id`.

    `start_length` is the sequence's length before the round's drafts; it does not travel, who asked
    knows it. `decisions` are one a draft that was checked. `open_window` is open now. If the window
    that was open before the round `failed`, no draft stands and `keep_length` is its position.
    `logprobs`, if asked for, has one for each token from where the round began, or from
    `keep_length` if that is less, up to and including `next_token_id`. A round of plain decoding
    has several verdicts, whose `plain_token_ids` are the last of the `keep_length` tokens, and
    whose `plain_confidence` is the mean probability of its tokens, 0 where nobody knows. The
    answer that grants a session its slot carries only `keep_length` and `sessions`.
    """

    keep_length: int
    next_token_id: int
    decisions: tuple[Decision, ...] = ()
    open_window: OpenWindow | None = None
    start_length: int = 0
    round_id: int = 0
    last: bool = True
    timings: VerifyTimings = field(default_factory=VerifyTimings)
    logprobs: tuple[TokenLogprobs, ...] = ()
    plain_token_ids: tuple[int, ...] = ()
    plain_confidence: float = 0.0
    sessions: SessionStatus | None = None

    @property
    def failed(self) -> bool:
        """Whether a window that was open before the round failed."""
        return self.keep_length < self.start_length

    @property
    def num_accepted(self) -> int:
        """Drafts that stand, if only for now."""
        return max(0, self.keep_length - self.start_length - len(self.plain_token_ids))

    @property
    def num_loose(self) -> int:
        """Tokens accepted although they differ from the target's own."""
        return sum(decision.outcome is Outcome.LOOSE for decision in self.decisions)

    @property
    def loose_cost_nats(self) -> float:
        """What they cost together."""
        loose = (d for d in self.decisions if d.outcome is Outcome.LOOSE)
        return sum(decision.gap_nats or 0.0 for decision in loose)

    @property
    def committed_length(self) -> int:
        """Tokens that are final."""
        return self.open_window.position if self.open_window else self.keep_length + 1
