"""Messages between the orchestrator and the services about a round. Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from flyspec.rules import Rule
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution, TokenLogprobs

MAX_SCORED = 64
"""Maximum appended tokens that a drafter is asked to score."""
MAX_STOP_TOKEN_IDS = 1024
MAX_TOP_TOKENS = 16
"""Maximum most likely tokens per row that a verdict returns, and rounds of which a drafter is told
at once."""
MAX_SCOPE_CHARACTERS = 64
MAX_TIME_LIMIT_MS = 2**32 - 1
MAX_STAGED_ROUNDS = 16
"""Maximum proposals ahead of a verdict, and rounds staged for it and those behind it."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A service's sessions, and tokens looked up and found in its KV cache.

    `waiting` sessions have no slot yet; `others` and `others_waiting` are those of `active` and
    `waiting` that belong to other orchestrators than the caller.
    """

    active: int = 0
    limit: int = 0
    opened_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    waiting: int = 0
    others: int = 0
    others_waiting: int = 0


class Outcome(IntEnum):
    """The verdict on one drafted token."""

    EXACT = 1
    LOOSE = 2
    PROVISIONAL = 3
    REJECTED = 4
    NOT_REACHED = 5

    @property
    def accepted(self) -> bool:
        """True if the token was accepted, at least provisionally."""
        return self <= Outcome.PROVISIONAL


@dataclass(frozen=True, slots=True)
class Budget:
    """Remainder of loose acceptance; None: no limit."""

    loose_tokens: int | None = None
    loose_cost_nats: float | None = None

    def less(self, num_tokens: int, cost_nats: float) -> Budget:
        """Return what is left after so many loose tokens of so much cost."""
        tokens, cost = self.loose_tokens, self.loose_cost_nats
        return Budget(
            None if tokens is None else max(0, tokens - num_tokens),
            None if cost is None else max(0.0, cost - cost_nats),
        )


class Decision(NamedTuple):
    """The decision about one drafted token.

    `target_token_id` is the target's own token there; it may be missing if not reached. `entropy`
    is in the rule's measure where the rule evaluated it, `measure` the quantity of rules that use
    another; `gap_nats` = raw logp(most likely) - logp(drafted), at mismatches.
    """

    outcome: Outcome
    target_token_id: int | None = None
    entropy: float | None = None
    gap_nats: float | None = None
    measure: float | None = None


class OpenWindow(NamedTuple):
    """A loosely accepted token at absolute `position` whose window is still open.

    `remaining_matches` >= 1 drafted positions must still match; otherwise the sequence is rolled
    back to `position`, and `target_token_id` replaces the token.
    """

    position: int
    target_token_id: int
    remaining_matches: int
    gap_nats: float
    target_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class DistributionSpec:
    """Which distributions a drafter sends: its `top_k` most likely tokens (0: all).

    `draw_from_it`: it draws from what it sends, with its own noise (rule `rejection`). `raw`: from
    the model's raw logits instead of the processed ones (`fuzzy-reference`).
    """

    top_k: int = 0
    draw_from_it: bool = False
    raw: bool = False


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Opens a draft session with the sequence so far; `prompt_length` of it is prompt (0: all).

    `tokenizer_fingerprint` is of the IDs' tokenizer; empty: the drafter's own.
    Sessions with the same `sharing_scope` may draft from each other's outputs; empty: none may.
    `drafter_vocab_size` is not sent: the drafter's number of IDs, to check its answers; 0: unknown.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    drafter: str = ""
    prompt_length: int = 0
    distribution: DistributionSpec | None = None
    tokenizer_fingerprint: str = ""
    sharing_scope: str = ""
    drafter_vocab_size: int = 0


class TopTokens(NamedTuple):
    """The target's most likely tokens after each of several tokens.

    `context_token_ids` is the token before the first of these, then those; `token_ids` has equally
    many for each, most likely first. They are consecutive, or `parents` says which of them each
    one after the first follows (`flyspec.draft_trees`).
    """

    context_token_ids: Sequence[int]
    token_ids: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def width(self) -> int:
        """Number of tokens for each context; 0 if the lists do not fit together."""
        rows = len(self.context_token_ids) - 1
        return len(self.token_ids) // rows if rows > 0 and len(self.token_ids) % rows == 0 else 0

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Each token with the one that it follows."""
        before, *tokens = self.context_token_ids
        parents = self.parents or range(len(tokens) - 1)
        return [
            (before, tokens[0]),
            *((tokens[p], t) for p, t in zip(parents, tokens[1:], strict=True)),
        ]


class DraftAhead(NamedTuple):
    """Asks for proposals for the likeliest verdicts on the last proposal, until the next request.

    Up to `num_proposals`, of up to `max_tokens` tokens each. The last `num_unverified` tokens that
    the request appends are that proposal; 0: it is the one requested now. With
    `unverified_ahead_id`, it is all of that proposal made ahead, and what follows it is kept.
    """

    num_proposals: int
    max_tokens: int
    num_unverified: int = 0
    unverified_ahead_id: int = 0


@dataclass(frozen=True, slots=True)
class DraftAdvance:
    """Keep `keep_length` tokens, append `append_token_ids`, propose up to `max_tokens`.

    The proposal ends after the token with which the product of its confidences falls below
    `min_confidence`. `score`: report for each appended token whether the drafter would have
    proposed it. `top_tokens` are of rounds since the last request. The drafter goes on as
    `ahead` says. `traceparent` is the caller's span; empty if not traced. With `max_tree_tokens`,
    the proposal may be a tree of as many tokens, with paths of up to `max_tokens`. It ends
    `time_limit_ms` (0: never) after the request arrived, with the tokens it has, at least one.
    """

    round_id: int
    keep_length: int
    append_token_ids: Sequence[int]
    max_tokens: int
    traceparent: str = ""
    min_confidence: float = 0.0
    score: bool = False
    top_tokens: Sequence[TopTokens] = ()
    ahead: DraftAhead | None = None
    max_tree_tokens: int = 0
    time_limit_ms: int = 0


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Times of one proposal in the draft service, ns."""

    queue_ns: int = 0
    model_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """Drafted tokens, possibly none: a chunk of a proposal, or several `joined`.

    `keep_length` and `next_token_id` are what the proposal builds on; `start_position` is of the
    first token. `distributions` has one per token if requested; `confidences` are as in `Drafted`;
    `agreements` has one per appended token, if scoring was requested and possible. `ahead`: drafted
    while the previous proposal was being verified; by itself if it has an `ahead_id`, behind the
    proposal made ahead with `follows_ahead_id`. With `parents`, one per token, they are a tree
    (`flyspec.draft_trees`), whose rows count over all chunks. The receiver sets the name of the
    `drafter` and `arrived_ns` (`perf_counter_ns`).
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
    parents: Sequence[int] = ()
    drafter: str = ""
    arrived_ns: int = 0
    ahead: bool = False
    ahead_id: int = 0
    follows_ahead_id: int = 0

    def joined(self, more: DraftChunk) -> DraftChunk:
        """Return this chunk and the next one as one."""
        return replace(
            more,
            start_position=self.start_position,
            token_ids=[*self.token_ids, *more.token_ids],
            origins=[*self.origins, *more.origins],
            distributions=(*self.distributions, *more.distributions),
            confidences=(*self.confidences, *more.confidences),
            agreements=(*self.agreements, *more.agreements),
            parents=(*self.parents, *more.parents),
        )

    def along(self, path: Sequence[int]) -> DraftChunk:
        """Return the chain of the tokens of a tree at these indices."""

        def some(items: Sequence[Any]) -> list[Any]:
            return [items[i] for i in path] if items else []

        return replace(
            self,
            token_ids=some(self.token_ids),
            origins=some(self.origins),
            distributions=some(self.distributions),
            confidences=some(self.confidences),
            parents=(),
        )

    def cut(self, first: int, end: int) -> DraftChunk:
        """Return the chunk with only tokens `first` to `end` (excluded); 0 to `end` of a tree."""
        assert not (first and self.parents)
        return replace(
            self,
            start_position=self.start_position + first,
            token_ids=self.token_ids[first:end],
            origins=self.origins[first:end],
            distributions=self.distributions[first:end],
            confidences=self.confidences[first:end],
            parents=self.parents[:end],
        )


@dataclass(slots=True)
class DraftCounts:
    """Counts of rounds with drafts, and of drafted and accepted tokens."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Fraction of drafted tokens that were accepted; 0 if nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted


@dataclass(frozen=True, slots=True)
class RuleSegment:
    """From absolute `start_position` up to the next segment, one of the session's rules judges.

    `rule_index` 0 is the session's `rule`, 1 and above are its `other_rules`. `budget` is what that
    rule may still accept loosely, on top of the round's own budget; segments with the same rule
    share the first one's.
    """

    start_position: int
    rule_index: int = 0
    budget: Budget = field(default_factory=Budget)

    def document(self) -> dict[str, int | float | None]:
        """Return it for JSON, with the names of the proto message."""
        return {
            "start_position": self.start_position,
            "rule_index": self.rule_index,
            "remaining_loose_tokens": self.budget.loose_tokens,
            "remaining_loose_cost_nats": self.budget.loose_cost_nats,
        }


@dataclass(frozen=True, slots=True)
class VerifyOpen:
    """Opens a verify session with the sequence so far, `prompt_length` of it the prompt.

    `other_rules` are for the segments that rounds name, besides `rule`.

    `logprobs` is the number of most likely tokens to report log-probabilities for, besides the
    token's own; None: report none. `waited_ms` is how long the request has waited; None: do not
    wait for a slot. `weights_fingerprint` and `numerics` must match the model's unless empty, and
    `judge_fingerprint` the judge's. `stop_token_ids` are ends of sequence to the rules.
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
    other_rules: Sequence[Rule] = ()
    judge_fingerprint: str = ""
    stop_token_ids: Sequence[int] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules of the session, by their `rule_index`."""
        return (self.rule, *self.other_rules)


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """Distributions of a round's drafts, starting at absolute `first_position`."""

    round_id: int
    first_position: int
    distributions: Sequence[TokenDistribution]


class HeadRequest(NamedTuple):
    """Which head of the target drafts after a round, up to `max_tokens` (0: it only reads it).

    The proposal ends as one of `DraftAdvance` with that `min_confidence`. With it, the head may go
    on with so many rounds that are not sent (`flyspec.self_drafting`). With `ignore_eos` it drafts
    behind an end of sequence, too.
    """

    name: str
    max_tokens: int
    min_confidence: float = 0.0
    num_rounds: int = 0
    ignore_eos: bool = False


class HeadProposal(NamedTuple):
    """A head's proposal, to follow a verdict's `next_token_id`.

    `confidences` has one per token, as in `Drafted`, and so has `distributions` if a rule of the
    session needs them.
    """

    token_ids: Sequence[int] = ()
    confidences: Sequence[float] = ()
    distributions: Sequence[TokenDistribution] = ()


class StagedOn(NamedTuple):
    """A possible verdict on a round, for which another round is staged."""

    round_id: int
    keep_length: int
    next_token_id: int


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """Keep, append, then judge the drafts; without drafts, decode up to `max_plain_tokens`.

    `draft_survivals`, one per draft or none, are the probabilities that a draft is reached and
    accepted, as far as the drafts before it tell; an overfull step leaves out the least likely
    drafts. More than `num_speculative_tokens` drafts are judged as several rounds of that many
    (0: as one). `traceparent` is the caller's span; empty if not traced. `teacher_forced` accepts
    all drafts, to score them by their log-probabilities. `rule_segments` say which rule judges
    where (none: rule 0). With drafts, `num_top_tokens` most likely tokens are returned for each
    verified row. A `head` of the target proposes what follows the last verdict. A round that is
    `staged_on` a verdict begins with it, and takes window and budget from there. With
    `draft_parents`, one per draft, the drafts are a tree (`flyspec.draft_trees`), and the verdict
    is about a path of it.
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
    teacher_forced: bool = False
    rule_segments: Sequence[RuleSegment] = ()
    num_top_tokens: int = 0
    head: HeadRequest | None = None
    staged_on: StagedOn | None = None
    draft_parents: Sequence[int] = ()

    def along(self, path: Sequence[int]) -> VerifyRound:
        """Return the round with only the drafts of a tree at these indices, as a chain."""
        drafts = [self.draft_token_ids[i] for i in path]
        return replace(self, draft_token_ids=drafts, draft_parents=(), draft_survivals=())


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Times of one verdict in the verify service, ns; `head_ns` is of its head's proposal."""

    queue_ns: int = 0
    forward_ns: int = 0
    judge_ns: int = 0
    service_ns: int = 0
    head_ns: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's verdict on a round: the sequence is now `keep_length` tokens, then `next_token_id`.

    `start_length` is the length before the round's drafts; it is not sent, as the caller knows it.
    `decisions` has one per verified draft. If the window that was open before the round `failed`,
    no draft is kept and `keep_length` is its position; `open_window` is the one open now.
    `logprobs`, if requested, has one entry per token from the round's start, or from `keep_length`
    if smaller, up to and including `next_token_id`. A round of plain decoding has several
    verdicts; its `plain_token_ids` are the last of the `keep_length` tokens. `top_token_ids`, if
    requested, has equally many for each row, in the rows' order. `proposal` is that of the round's
    head, if requested and possible. If the drafts were a tree, `path` has the indices of those that
    were judged, which the decisions are about. `started_staged_round_id` is the staged round that
    begins with it, if it had arrived, or the one that a head goes on with; `drafts` are those of
    such a round. The response that grants a session its slot has only `keep_length` and `sessions`.
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
    sessions: SessionStatus | None = None
    top_token_ids: tuple[int, ...] = ()
    proposal: HeadProposal | None = None
    started_staged_round_id: int = 0
    path: tuple[int, ...] = ()
    drafts: HeadProposal | None = None

    @property
    def on(self) -> StagedOn:
        """Condition on which a staged round begins with this verdict."""
        return StagedOn(self.round_id, self.keep_length, self.next_token_id)

    @property
    def failed(self) -> bool:
        """True if a window that was open before the round failed."""
        return self.keep_length < self.start_length

    @property
    def num_accepted(self) -> int:
        """Accepted drafts, including provisional ones."""
        return max(0, self.keep_length - self.start_length - len(self.plain_token_ids))

    @property
    def loose_cost_nats(self) -> float:
        loose = (d for d in self.decisions if d.outcome is Outcome.LOOSE)
        return sum(decision.gap_nats or 0.0 for decision in loose)

    def left_of(self, budget: Budget) -> Budget:
        """Return what is left of a budget after the drafts that were accepted."""
        loose = [
            decision.gap_nats or 0.0
            for decision in self.decisions[: self.num_accepted]
            if decision.outcome in (Outcome.LOOSE, Outcome.PROVISIONAL)
        ]
        return budget.less(len(loose), sum(loose))

    @property
    def committed_length(self) -> int:
        """Number of final tokens."""
        return self.open_window.position if self.open_window else self.keep_length + 1
