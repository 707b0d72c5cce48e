"""Sessions of the verify service: a sequence, its slot, and how much of it the cache holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.engine.model import Step
from flyspec.errors import InvalidArgumentError, PrefixMismatchError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.ranges import Range
from flyspec.rules import MAX_WINDOW_SIZE, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule, validate_rule
from flyspec.validation import common_distribution_spec, validate_sampling
from flyspec.values.admin import JudgeInfo, ModelInfo
from flyspec.values.phases import MAX_RULES
from flyspec.values.rounds import (
    MAX_TOP_TOKENS,
    DistributionSpec,
    OpenWindow,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import MAX_TOP_LOGPROBS, SamplingParams
from verify_service.rules.arguments import check_segments
from verify_service.slot_queue import SessionPlace

MAX_ORCHESTRATOR_ID_CHARACTERS = 64
READ_AGAIN = 64
"""Maximum tokens that the target reads again for a head that misses them. They cost little beside
a step, and a head that knows only the last few drafts badly."""


def check_token_ids(name: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    if token_ids and max(token_ids) >= info.vocab_size:
        raise InvalidArgumentError(
            f"{name}: token id {max(token_ids)} is out of range; "
            f"{info.name} has ids 0 to {info.vocab_size - 1}"
        )


def check_open(open_: VerifyOpen, info: ModelInfo, judge: JudgeInfo | None = None) -> None:
    """Raise for bad values, and for a generation that began with another target or `judge`."""
    length = len(open_.token_ids)
    if not length:
        raise InvalidArgumentError("open.token_ids is empty; send at least one token")
    if length > info.context_length:
        raise InvalidArgumentError(
            f"open.token_ids: {length} tokens exceed the model's context of "
            f"{info.context_length}; shorten the prompt"
        )
    Range(1, length).check("open.prompt_length", open_.prompt_length)
    if open_.logprobs is not None:
        Range(0, MAX_TOP_LOGPROBS).check("open.logprobs", open_.logprobs)
    if len(open_.orchestrator_id) > MAX_ORCHESTRATOR_ID_CHARACTERS:
        raise InvalidArgumentError(
            f"open.orchestrator_id must be at most {MAX_ORCHESTRATOR_ID_CHARACTERS} characters, "
            f"got {len(open_.orchestrator_id)}"
        )
    for what in ("weights_fingerprint", "numerics"):
        wanted, own = getattr(open_, what), getattr(info, what)
        if wanted not in ("", own):
            raise UnavailableError(
                f"open.{what}: the generation began with {wanted!r:.120}, but {info.name} has "
                f"{own!r}; open the session on a replica whose Describe response matches"
            )
    if len(open_.rules) > MAX_RULES:
        raise InvalidArgumentError(
            f"open.other_rules: at most {MAX_RULES - 1} rules, got {len(open_.other_rules)}"
        )
    validate_rule(open_.rule)
    for index, rule in enumerate(open_.other_rules):
        validate_rule(rule, f"open.other_rules[{index}]")
    if open_.judge_fingerprint not in ("", judge.fingerprint if judge else ""):
        raise UnavailableError(
            f"open.judge_fingerprint: the generation began with {open_.judge_fingerprint!r:.120}, "
            f"but {info.name} has {judge.fingerprint if judge else 'no judge'!r}; open the session "
            "on a replica whose Describe response matches"
        )
    for rule in open_.rules:
        if judge is None and RULE_PRESETS[rule.name].hidden_layers:
            raise InvalidArgumentError(
                f"open.rule.name: the rule {rule.name!r} needs a judge, and {info.name} has none; "
                "start the verify service with --autojudge-file, or use another rule"
            )
    validate_sampling(open_.sampling)
    common_distribution_spec([resolve_rule(rule) for rule in open_.rules], open_.sampling)
    check_token_ids("open.token_ids", open_.token_ids, info)
    check_token_ids("open.stop_token_ids", open_.stop_token_ids, info)
    for rule in open_.rules:
        check_token_ids("open.rule.guarded_token_ids", rule.guarded_token_ids, info)
    check_token_ids("open.sampling.logit_bias", [t for t, _ in open_.sampling.logit_bias], info)


@dataclass(slots=True, eq=False)
class TargetSession:
    """One client's sequence. Keys and values of its first `cached` tokens are in `slot`.

    The slot is acquired in the first round. Segments of rounds name the `rules`, which become
    resolved ones, by their index.
    """

    sequence: TokenSequence
    prompt_length: int
    rules: Sequence[Rule]
    sampling: SamplingParams
    seed: int
    info: ModelInfo
    place: SessionPlace
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    slot: int | None = None
    cached: int = 0
    heads: dict[str, int] = field(default_factory=dict)
    """Number of positions that each head of the target holds, the last token's never."""
    failed_heads: set[str] = field(default_factory=set)
    interrupted: bool = False
    """True if the next round has arrived, which ends plain decoding."""
    distribution: DistributionSpec | None = field(init=False)
    """The draft distributions that the rules need."""

    def __post_init__(self) -> None:
        self.rules = [*map(resolve_rule, self.rules)]
        self.distribution = common_distribution_spec(self.rules, self.sampling)

    @property
    def draws_plainly(self) -> bool:
        """True if plain decoding needs only the model's own draw: defaults and no logprobs."""
        return self.sampling == SamplingParams() and self.logprobs is None

    def rule_of(self, round_: VerifyRound) -> Rule:
        """Return the rule that judges the round's first draft; rule 0 if the round is invalid."""
        segments = round_.rule_segments
        index = segments[0].rule_index if segments else 0
        return self.rules[index if index < len(self.rules) else 0]

    def begin(self, round_: VerifyRound) -> None:
        """Set the sequence to the round's prefix.

        Raises `PrefixMismatchError` if the session does not hold it, `InvalidArgumentError` for bad
        values.
        """
        held = len(self.sequence)
        if round_.keep_length > held:
            raise PrefixMismatchError(
                f"round.keep_length is {round_.keep_length} but the session holds {held} tokens; "
                "open a new session with the whole prefix"
            )
        length = round_.keep_length + len(round_.append_token_ids)
        if length == 0:
            raise InvalidArgumentError(
                "round: the sequence is empty; keep or append at least one token"
            )
        # Every row needs a position; the last draft's row predicts one more token.
        if length + len(round_.draft_token_ids) > self.info.context_length:
            raise InvalidArgumentError(
                f"round: {length} tokens and {len(round_.draft_token_ids)} drafts exceed the "
                f"model's context of {self.info.context_length}; send fewer drafts"
            )
        check_token_ids("round.append_token_ids", round_.append_token_ids, self.info)
        check_token_ids("round.draft_token_ids", round_.draft_token_ids, self.info)
        if len(round_.draft_survivals) not in (0, len(round_.draft_token_ids)):
            raise InvalidArgumentError(
                f"round.draft_survivals has {len(round_.draft_survivals)} entries for "
                f"{len(round_.draft_token_ids)} drafts; send one per draft or none"
            )
        if not all(0 <= survival <= 1 for survival in round_.draft_survivals):  # NaN too
            raise InvalidArgumentError(
                "round.draft_survivals: send probabilities, each between 0 and 1"
            )
        Range(0, MAX_TOP_TOKENS).check("round.num_top_tokens", round_.num_top_tokens)
        if round_.teacher_forced and (self.logprobs is None or not round_.draft_token_ids):
            raise InvalidArgumentError(
                "round.teacher_forced: send drafts, and set logprobs when opening the session"
            )
        cost = round_.budget.loose_cost_nats
        if cost is not None and not cost >= 0:  # NaN too
            raise InvalidArgumentError(
                f"round.remaining_loose_cost_nats must be at least 0, got {cost}"
            )
        check_segments(round_.rule_segments, len(self.rules), length)
        self.sequence.keep(round_.keep_length)
        self.cached = min(self.cached, round_.keep_length)
        self.cut_heads(round_.keep_length)
        self.sequence.extend(round_.append_token_ids)
        if round_.prefix_hash not in (0, self.sequence.hash):
            raise PrefixMismatchError(
                f"round.prefix_hash does not match the {length} tokens of this sequence; "
                "open a new session with the whole prefix"
            )
        if round_.open_window is not None:
            self._check_window(round_.open_window)

    def _check_window(self, window: OpenWindow) -> None:
        check_token_ids("round.open_window.target_token_id", [window.target_token_id], self.info)
        length = len(self.sequence)
        if not self.prompt_length <= window.position < length:
            raise InvalidArgumentError(
                f"round.open_window.position must be between the prompt length "
                f"{self.prompt_length} and {length - 1}, got {window.position}"
            )
        matches = Range(1, MAX_WINDOW_SIZE)
        matches.check("round.open_window.remaining_matches", window.remaining_matches)
        if not window.gap_nats >= 0:  # NaN too
            raise InvalidArgumentError(
                f"round.open_window.gap_nats must be at least 0, got {window.gap_nats}"
            )
        given = window.target_logprobs
        if given is None:
            if self.logprobs is not None:
                raise InvalidArgumentError(
                    "round.open_window.target_logprobs is missing; send the window back as received"
                )
            return
        name = "round.open_window.target_logprobs"
        check_token_ids(f"{name}.top_token_ids", given.top_token_ids, self.info)
        if len(given.top_token_ids) != len(given.top_logprobs) or any(
            map(math.isnan, (given.logprob, *given.top_logprobs))
        ):
            raise InvalidArgumentError(
                f"{name} must have a number for each token; send the window back as received"
            )

    def cut_heads(self, length: int) -> None:
        """Record that only the first `length` tokens still follow what the heads have read.

        What a head holds of a position depends on the token after it.
        """
        self.heads = {name: min(held, max(0, length - 1)) for name, held in self.heads.items()}

    def step(
        self, draft_token_ids: Sequence[int], hidden_layers: tuple[int, ...] = (), head: str = ""
    ) -> Step:
        """Return the step of this round: the uncached tokens, then the drafts.

        The last token is rerun even if cached: its logits judge the first draft. For a `head`, so
        are some that it misses, and the hidden rows are those of all positions that it misses.
        """
        assert self.slot is not None
        start = min(self.cached, len(self.sequence) - 1)
        held = self.heads.get(head, 0)
        if head:
            start = min(start, max(held, start - READ_AGAIN))
        token_ids = [*self.sequence.tokens[start:], *draft_token_ids]
        return Step(
            slot=self.slot,
            start=start,
            token_ids=token_ids,
            num_logits=len(draft_token_ids) + 1,
            hidden_layers=hidden_layers,
            num_hidden=len(token_ids) - max(0, held - start) if head else None,
        )

    def apply(self, verdict: Verdict, draft_token_ids: Sequence[int]) -> None:
        """Append the accepted tokens, or go back to the position of a failed window."""
        if verdict.failed:
            self.sequence.keep(verdict.keep_length)
        else:
            self.sequence.extend(draft_token_ids[: verdict.num_accepted])
            self.sequence.extend(verdict.plain_token_ids)
        self.cached = verdict.keep_length
        self.sequence.extend([verdict.next_token_id])
