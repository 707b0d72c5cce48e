"""Rounds that wait for a verdict to begin with (`VerifyRound.staged_on`), of one stream.

They wait for the verdict on the newest round, or on one that waits itself. A staged round saves the
trip of its predecessor's verdict to the orchestrator, and its own back. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flyspec.draft_trees import behind
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import (
    MAX_STAGED_ROUNDS,
    Budget,
    StagedOn,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import TokenDistribution


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
