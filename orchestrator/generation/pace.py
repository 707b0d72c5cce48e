"""What the next round does: how many tokens it drafts, or that it decodes plainly. Pure.

A pace is told what came of the rounds and asked for the next turn. Here are those that know it
beforehand: a fixed K, and the Ks of an earlier run; `adaptive` has the one that learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from flyspec.values.rounds import DraftChunk, Verdict
from orchestrator.generation.following import Overtaken


class NextRound(NamedTuple):
    """Draft up to `num_drafts` tokens, less when the drafter gets unsure; 0: decode plainly.

    `max_plain_tokens` bounds plain decoding. A proposal that takes longer than `patience_ns` is not
    waited for; None waits as long as a drafter may take.
    """

    num_drafts: int
    min_confidence: float = 0.0
    max_plain_tokens: int | None = None
    patience_ns: int | None = None


class CheckedRound(NamedTuple):
    """A verdict, on a proposal or without one; `round_ns` since the one before it."""

    proposal: DraftChunk
    verdict: Verdict
    num_emitted: int
    round_ns: int


class Pace(Protocol):
    """Told of everything that happens, in order.

    `saved_ns` is what rounds with drafts took less than plain decoding of their tokens.
    """

    @property
    def repeats(self) -> bool:
        """Whether the next round is one of an earlier run, to be repeated as it was."""

    @property
    def saved_ns(self) -> int:
        """So far; less than 0 if they took more, 0 where nobody knows."""

    def turn(self) -> NextRound:
        """What the next round does, as things stand; asked as often as one likes."""

    def checked(self, round_: CheckedRound) -> None:
        """A verdict has come."""

    def nothing_drafted(self) -> None:
        """The drafter had no proposal when it was asked for one."""

    def window_failed(self) -> None:
        """An open window has failed for want of drafts."""

    def follows(self, num_tokens: int) -> int:
        """Whether the drafter should follow plain decoding now, and how much it should propose.

        `num_tokens` have been decoded since it was asked last. 0: not now.
        """

    def followed(self, overtaken: Overtaken) -> None:
        """It has."""

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """The chance of each drafted token to be reached and accepted; none if nobody knows."""


class FixedPace:
    """The same K in every round."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._turn = NextRound(num_speculative_tokens)

    @property
    def repeats(self) -> bool:
        """Nothing is repeated."""
        return False

    @property
    def saved_ns(self) -> int:
        """Not known."""
        return 0

    def turn(self) -> NextRound:
        """K drafts."""
        return self._turn

    def checked(self, round_: CheckedRound) -> None:
        """Nothing changes."""

    def nothing_drafted(self) -> None:
        """Nothing changes."""

    def window_failed(self) -> None:
        """Nothing changes."""

    def follows(self, num_tokens: int) -> int:
        """Plain decoding stays plain."""
        return 0

    def followed(self, overtaken: Overtaken) -> None:
        """Nothing changes."""

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Not known."""
        return ()


class RepeatedPace(FixedPace):
    """The Ks of an earlier run, 0 a token of plain decoding; then as `rest`.

    Told of what follows, `rest` knows of nothing before.
    """

    def __init__(self, num_draft_tokens_per_round: Sequence[int], rest: Pace) -> None:
        super().__init__(0)
        self._left = list(reversed(num_draft_tokens_per_round))
        self._rest = rest

    @property
    def repeats(self) -> bool:
        """Until the Ks are used up."""
        return bool(self._left)

    @property
    def saved_ns(self) -> int:
        """By the rest."""
        return self._rest.saved_ns

    def turn(self) -> NextRound:
        """The next K, or as many plain tokens as come one after the other."""
        left = self._left
        if not left:
            return self._rest.turn()
        if left[-1]:
            return NextRound(left[-1])
        end = next((i for i in range(len(left) - 1, -1, -1) if left[i]), -1)
        return NextRound(0, max_plain_tokens=len(left) - 1 - end)

    def checked(self, round_: CheckedRound) -> None:
        """Go on to the next one."""
        if not self._left:
            self._rest.checked(round_)
            return
        count = 1 if round_.verdict.decisions else 1 + len(round_.verdict.plain_token_ids)
        del self._left[-count:]

    def nothing_drafted(self) -> None:
        """So it was then."""
        if not self._left:
            self._rest.nothing_drafted()

    def window_failed(self) -> None:
        """It was counted as a round without drafts."""
        del self._left[-1:]

    def follows(self, num_tokens: int) -> int:
        """Not before the rest."""
        return 0 if self._left else self._rest.follows(num_tokens)

    def followed(self, overtaken: Overtaken) -> None:
        """As the rest."""
        self._rest.followed(overtaken)

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Unknown before the rest, so that nothing is left out."""
        return () if self._left else self._rest.survivals(proposal)
