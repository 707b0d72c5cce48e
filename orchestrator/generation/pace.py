"""The number of tokens that each round drafts: the interface, a fixed K, and Ks of an earlier run.

A pace observes the results of rounds and returns the next turn. `orchestrator.pace` learns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from flyspec.drafter_names import PREDICTION
from flyspec.values.rounds import DraftChunk, Verdict
from orchestrator.generation.following import Overtaken

SHORT_PROMPT = 512
"""Tokens. The drafter only reads a longer prompt after the target's first token."""
MAX_DELAY, MAX_LONG_DELAY = 0.2, 0.05
"""Maximum share by which drafting may delay the first token after a short and a longer prompt."""


class NextRound(NamedTuple):
    """Draft up to `num_drafts` tokens (0: decode without drafts).

    The drafter stops early below `min_confidence`. `max_plain_tokens` limits decoding without
    drafts. The round does not wait longer than `patience_ns` for a proposal; None waits as long as
    the drafter may take.
    """

    num_drafts: int
    min_confidence: float = 0.0
    max_plain_tokens: int | None = None
    patience_ns: int | None = None


class CheckedRound(NamedTuple):
    """A verdict, with or without a proposal; `round_ns` is the time since the previous one.

    `num_drafted` are the drafts that the target has read: of a tree more than were judged. If it
    `asked_head`, a head of the target drafted for the next round.
    """

    proposal: DraftChunk
    verdict: Verdict
    num_emitted: int
    round_ns: int
    num_drafted: int = 0
    asked_head: bool = False


class Pace(ABC):
    """A strategy for choosing K. Its methods must be called for all events, in order."""

    num_unrepeated = 0
    """Rounds so far that were to repeat an earlier run's and had other drafts."""

    @property
    def repeats(self) -> bool:
        """True if the next round repeats one of an earlier run."""
        return False

    @property
    def lets_go_on(self) -> bool:
        """True if a head that is asked with this turn's round may go on with rounds like it."""
        return True

    @property
    def saved_ns(self) -> int:
        """Time saved so far, compared with decoding the same tokens without drafts, in ns.

        Negative if rounds with drafts took longer; 0 if unknown.
        """
        return 0

    @abstractmethod
    def turn(self) -> NextRound:
        """Return what the next round should do; has no side effects."""

    def checked(self, round_: CheckedRound) -> None:  # noqa: B027 - optional
        """Record a verdict."""

    def close(self) -> None:  # noqa: B027
        """Record the end of the generation."""

    def nothing_drafted(self) -> None:  # noqa: B027
        """Record that the drafter had no proposal."""

    def window_failed(self) -> None:  # noqa: B027
        """Record that an open window failed for lack of drafts."""

    def follows(self) -> int:
        """Return how many tokens a drafter following plain decoding should propose now; 0: none."""
        return 0

    def followed(self, overtaken: Overtaken) -> None:  # noqa: B027
        """Record a proposal from a drafter following plain decoding."""

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Return the probability that each draft is reached and accepted; empty if unknown."""
        return ()


class FirstToken(NamedTuple):
    """Cost of drafting before the first token.

    `relative_size`: parameters of the draft model divided by the target's.
    """

    relative_size: float
    prompt_length: int

    @property
    def is_light(self) -> bool:
        """True if a drafter reading beside the target, perhaps on its cores, hardly delays it."""
        return self.relative_size <= MAX_DELAY

    @property
    def may_share(self) -> bool:
        """True if the drafter may read the prompt while the target does."""
        return self.is_light and self.prompt_length <= SHORT_PROMPT

    def is_delayed(self, num_drafts: int) -> bool:
        """True if drafting so many tokens after the prompt would delay the first token noticeably.

        A drafter takes about its relative size of the target's time, for the prompt and for a
        token. It depends on sizes and not on measured times, so that texts can be repeated.
        """
        limit = MAX_DELAY if self.prompt_length <= SHORT_PROMPT else MAX_LONG_DELAY
        return (1 + num_drafts) * self.relative_size > limit


class FixedPace(Pace):
    """The same K in every round, `at_once` or after the first token; K 0 is plain decoding.

    The target decodes the first token while the drafter reads the prompt, if it `may_share`.
    """

    def __init__(
        self, num_speculative_tokens: int, at_once: bool = False, may_share: bool = True
    ) -> None:
        self._k, self._may_share = num_speculative_tokens, may_share
        self._begun = at_once or not self._k

    def turn(self) -> NextRound:
        return NextRound(self._k) if self._begun else NextRound(0, max_plain_tokens=1)

    def checked(self, round_: CheckedRound) -> None:
        self._begun = True

    def follows(self) -> int:
        return self._k if self._may_share and not self._begun else 0


class RepeatedPace(Pace):
    """Repeats the Ks of an earlier run, then continues as `rest`.

    A K of 0 is one token decoded without drafts. `rest` only sees the rounds after the repeated
    ones. `drafter` is the one whose drafts repeat the earlier run's.
    """

    def __init__(self, num_draft_tokens_per_round: Sequence[int], rest: Pace, drafter: str) -> None:
        self._left = list(reversed(num_draft_tokens_per_round))
        self._rest, self._drafters = rest, (drafter, PREDICTION)

    @property
    def repeats(self) -> bool:
        return bool(self._left)

    @property
    def lets_go_on(self) -> bool:
        return not self._left and self._rest.lets_go_on

    @property
    def saved_ns(self) -> int:
        return self._rest.saved_ns

    def turn(self) -> NextRound:
        """Return a round with the next K, or a run of consecutive plain tokens."""
        left = self._left
        if not left:
            return self._rest.turn()
        if left[-1]:
            return NextRound(left[-1])
        end = next((i for i in range(len(left) - 1, -1, -1) if left[i]), -1)
        return NextRound(0, max_plain_tokens=len(left) - 1 - end)

    def checked(self, round_: CheckedRound) -> None:
        if not self._left:
            self._rest.checked(round_)
            return
        num_drafted = max(round_.num_drafted, len(round_.verdict.decisions))
        other = num_drafted and round_.proposal.drafter not in self._drafters
        self.num_unrepeated += bool(other) or num_drafted != self._left[-1]
        count = 1 if num_drafted else 1 + len(round_.verdict.plain_token_ids)
        del self._left[-count:]

    def nothing_drafted(self) -> None:
        """Do nothing while repeating: the earlier run had no proposal here either."""
        if not self._left:
            self._rest.nothing_drafted()

    def close(self) -> None:
        self._rest.close()

    def window_failed(self) -> None:
        """Advance: the earlier run counted this as a round without drafts."""
        self.num_unrepeated += any(self._left[-1:])
        del self._left[-1:]

    def follows(self) -> int:
        return 0 if self._left else self._rest.follows()

    def followed(self, overtaken: Overtaken) -> None:
        self._rest.followed(overtaken)

    def survivals(self, proposal: DraftChunk) -> Sequence[float]:
        """Return nothing while repeating, so that all drafts are verified."""
        return () if self._left else self._rest.survivals(proposal)
