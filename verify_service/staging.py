"""A stream's messages for rounds to come: distributions of drafts, and rounds that are staged.

Staged rounds wait for a verdict to begin with (`VerifyRound.staged_on`): that on the newest round,
or on one that waits itself. A staged round saves the trip of its predecessor's verdict to the
orchestrator, and its own back. Runs on the event loop; checks that depend on the session's sequence
are in `sessions` and run in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flyspec.config import VerifySettings
from flyspec.draft_trees import behind
from flyspec.engine.distributions import check_received
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.rpc import Lengths
from flyspec.rules import MAX_GUARDED_TOKENS
from flyspec.validation import BIAS_LENGTH
from flyspec.values.admin import ModelInfo
from flyspec.values.phases import MAX_RULES
from flyspec.values.rounds import (
    MAX_STAGED_ROUNDS,
    MAX_STOP_TOKEN_IDS,
    Budget,
    DraftDistributions,
    StagedOn,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import MAX_TOP_LOGPROBS, TokenDistribution

RULE_LENGTHS: Lengths = {
    "guarded_token_ids": (MAX_GUARDED_TOKENS, f"tokens; send at most {MAX_GUARDED_TOKENS}"),
}


def length_limits(info: ModelInfo, settings: VerifySettings) -> dict[str, Lengths]:
    """Return the maximum lengths of a request's lists."""
    context, drafts = info.context_length, settings.max_speculative_tokens
    sequence = (context, f"tokens exceed the model's context of {context}; shorten the prompt")
    top = (MAX_TOP_LOGPROBS, f"tokens; send at most {MAX_TOP_LOGPROBS}")
    return {
        "open": {
            "token_ids": sequence,
            **{f"rule.{name}": limit for name, limit in RULE_LENGTHS.items()},
            "other_rules": (MAX_RULES - 1, f"rules; send at most {MAX_RULES - 1}"),
            "sampling.logit_bias": BIAS_LENGTH,
            "stop_token_ids": (MAX_STOP_TOKEN_IDS, f"tokens; send at most {MAX_STOP_TOKEN_IDS}"),
        },
        "round": {
            "append_token_ids": sequence,
            "draft_token_ids": (drafts, f"drafts; this service checks at most {drafts}"),
            "draft_parents": (drafts, f"entries; this service checks at most {drafts} drafts"),
            "rule_segments": (drafts + 1, f"segments; {drafts} drafts have at most as many"),
            "draft_survivals": (drafts, f"entries; this service checks at most {drafts} drafts"),
            "open_window.target_logprobs.top_token_ids": top,
            "open_window.target_logprobs.top_logprobs": top,
        },
        "distributions": {"distributions": (drafts, _one_a_draft(drafts))},
    }


def _one_a_draft(most: int) -> str:
    return f"for one round; send between 1 and {most}, one per drafted token"


class RoundInbox:
    """Data that a stream has sent for its next round: the drafts' distributions.

    Rounds arrive in the order of their ids; a repeated or late round is rejected.
    """

    def __init__(self, info: ModelInfo, settings: VerifySettings) -> None:
        self._info, self._settings = info, settings
        self._last_round_id = -1
        self._pieces: list[DraftDistributions] = []
        self._count = 0

    def add(self, piece: DraftDistributions) -> None:
        """Store a piece for the next round. Raises `InvalidArgumentError`."""
        self._count += len(piece.distributions)
        most = self._settings.max_speculative_tokens
        if not piece.distributions or self._count > most:
            raise InvalidArgumentError(f"distributions: {self._count} {_one_a_draft(most)}")
        check_received(piece.distributions, self._info.vocab_size)
        self._pieces.append(piece)

    def take(self, round_: VerifyRound) -> list[TokenDistribution]:
        """Return the distributions of this round's drafts, one per draft or none.

        Raises `InvalidArgumentError` for a round that is too long or has another round's
        distributions, `PrefixMismatchError` for one out of order.
        """
        if round_.round_id <= self._last_round_id:
            raise PrefixMismatchError(
                f"round.round_id is {round_.round_id} after {self._last_round_id}, but each round "
                "must arrive once and in order; open a new session with the whole prefix"
            )
        self._last_round_id = round_.round_id
        if round_.max_plain_tokens > self._settings.max_plain_tokens:
            raise InvalidArgumentError(
                f"round.max_plain_tokens must be at most {self._settings.max_plain_tokens}, "
                f"got {round_.max_plain_tokens}"
            )
        drafts = len(round_.draft_token_ids)
        if self._count not in (0, drafts):
            raise InvalidArgumentError(
                f"distributions: {self._count} for {drafts} drafted tokens; send one per token"
            )
        first = round_.keep_length + len(round_.append_token_ids)
        found: list[TokenDistribution] = []
        for piece in self._pieces:
            if (piece.round_id, piece.first_position) != (round_.round_id, first):
                raise InvalidArgumentError(
                    f"distributions: sent for round {piece.round_id} from position "
                    f"{piece.first_position}, but they precede round {round_.round_id} at "
                    f"position {first}"
                )
            first += len(piece.distributions)
            found += piece.distributions
        self._pieces, self._count = [], 0
        return found


class WaitingRound(NamedTuple):
    """A round and its drafts' distributions, one per draft or none."""

    round_: VerifyRound
    distributions: Sequence[TokenDistribution]


class StagedRounds:
    """The rounds staged for the last verdict on the newest round of a stream, and for theirs."""

    def __init__(self) -> None:
        self._newest, self._last_id, self._budget = -1, -1, Budget()
        self._waiting: dict[StagedOn, WaitingRound] = {}
        self._verdict: Verdict | None = None  # with which nothing has begun yet

    def received(self, round_: VerifyRound) -> None:
        """Note that a round arrived that is not staged: it drops all that are."""
        self._newest, self._budget = round_.round_id, round_.budget
        self._last_id = max(self._last_id, round_.round_id)
        self._waiting.clear()
        self._verdict = None

    def stage(self, waiting: WaitingRound) -> WaitingRound | None:
        """Keep a staged round, or return it ready to begin if its verdict has been given.

        One for an earlier round, or one that has been dropped, comes too late and is dropped.
        Raises `InvalidArgumentError`.
        """
        round_, on = waiting.round_, waiting.round_.staged_on
        assert on is not None
        self._check(round_, on)
        self._last_id = max(self._last_id, round_.round_id)
        if self._verdict is not None and self._verdict.on == on:
            return self._begin(waiting, self._verdict)
        if on.round_id not in (self._newest, *(w.round_.round_id for w in self._waiting.values())):
            return None
        if on not in self._waiting and len(self._waiting) >= MAX_STAGED_ROUNDS:
            raise InvalidArgumentError(
                f"round.staged_on: {MAX_STAGED_ROUNDS} rounds are staged already; stage fewer"
            )
        self._waiting[on] = waiting
        return None

    def after(self, verdict: Verdict) -> WaitingRound | None:
        """Return the round that begins with a round's last verdict, ready to begin."""
        if verdict.round_id != self._newest:
            return None
        waiting = self._waiting.get(verdict.on)
        if waiting is not None:
            return self._begin(waiting, verdict)
        self._verdict = verdict
        return None

    def _begin(self, waiting: WaitingRound, verdict: Verdict) -> WaitingRound:
        round_ = replace(
            waiting.round_,
            staged_on=None,
            open_window=verdict.open_window,
            budget=verdict.left_of(self._budget),
        )
        others = self._waiting.items()
        kept = behind(round_.round_id, ((o.round_.round_id, on.round_id) for on, o in others))
        following = {on: other for on, other in others if on.round_id in kept}
        self.received(round_)
        self._waiting.update(following)
        return waiting._replace(round_=round_)

    def _check(self, round_: VerifyRound, on: StagedOn) -> None:
        if on.round_id > self._last_id:
            raise InvalidArgumentError(
                f"round.staged_on.round_id is {on.round_id}, but the last round is "
                f"{self._last_id}; send that round first"
            )
        if not round_.draft_token_ids:
            raise InvalidArgumentError("round.staged_on: a staged round needs drafts")
        if round_.open_window or round_.rule_segments or round_.budget != Budget():
            raise InvalidArgumentError(
                "round.staged_on: a staged round takes the open window and the limits on loose "
                "tokens from the verdict, and has no segments; leave them unset"
            )
        if round_.keep_length != on.keep_length + 1 or round_.append_token_ids:
            raise InvalidArgumentError(
                f"round.staged_on: the sequence has {on.keep_length + 1} tokens after that "
                f"verdict; set keep_length to that, not {round_.keep_length}, and append nothing"
            )
