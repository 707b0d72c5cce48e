"""Windows: does the draft agree with the target again after a mismatch?

`Window` is a rule's requirement. `WindowWalk` tracks it position by position while a round is
judged, and returns the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flyspec.rules import WindowScope
from flyspec.rules.room import round_end
from flyspec.values.rounds import Decision, OpenWindow, Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Window:
    """Matches required after a loosely accepted token.

    With positions j = 1..K of a round, `following` positions after a mismatch at j must all match.
    Only matches count: a second mismatch fails the window, whether or not it would be accepted
    itself. Within a round (arXiv 2511.22972, Algorithm 1: the token-level window) j + `reach` <= K
    must also hold; across rounds the window stays open until enough positions are checked.
    """

    following: int
    reach: int
    scope: WindowScope = WindowScope.WITHIN_ROUND

    @property
    def across_rounds(self) -> bool:
        """True if the window may outlast its round."""
        return self.scope is WindowScope.ACROSS_ROUNDS


class WindowWalk:
    """Tracks the windows of one round, by the requirements of each position's rule.

    `windows` and `matches` have one entry per draft. Windows within a round look ahead in it, so
    that what they allow is final; `length` divides it into rounds of that many drafts, with a bonus
    token between two of them (0: a single round). Of windows across rounds, at most one is open;
    later positions and rounds close or fail it, whatever their rules. `open_window` is the one left
    open by the previous round.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        start_position: int,
        matches: Sequence[bool],
        length: int = 0,
        open_window: OpenWindow | None = None,
    ) -> None:
        self._windows, self._matches = windows, matches
        self._start, self._length = start_position, length
        self._open = open_window
        self._opened_at: int | None = None  # index in this round; None if opened before

    @property
    def is_open(self) -> bool:
        """True if a window is open; a mismatch in an open one fails it."""
        return self._open is not None

    def allows(self, index: int) -> bool:
        """Return whether the windows allow accepting a mismatch at this index (from 0)."""
        if self.is_open:
            return False
        window = self._windows[index]
        return window.across_rounds or self._closes(window, index)

    def _closes(self, window: Window, index: int) -> bool:
        """Return whether a window within the round, opened at this index, closes in it."""
        end = round_end(index, len(self._matches), self._length)
        if index + 1 + window.reach > end:
            return False
        return all(self._matches[index + 1 : min(end, index + 1 + window.following)])

    def is_bonus(self, index: int) -> bool:
        """Return whether the index is a bonus token's: only the target's own token is accepted.

        Rules with windows across rounds do not distinguish it.
        """
        if self._length == 0 or self._windows[index].across_rounds:
            return False
        return index % (self._length + 1) == self._length

    def passed(self, index: int, decision: Decision) -> None:
        """Record that the draft at this index is accepted, as a match or loosely.

        A match counts towards the open window; a loose token opens one.
        """
        if decision.outcome is Outcome.LOOSE:
            self._open_for(index, decision)
        elif self._open is not None:
            remaining = self._open.remaining_matches - 1
            self._open = self._open._replace(remaining_matches=remaining) if remaining else None

    def _open_for(self, index: int, decision: Decision) -> None:
        window = self._windows[index]
        if window.following == 0 or not window.across_rounds:
            return  # the token is final at once
        assert decision.target_token_id is not None
        assert decision.gap_nats is not None
        self._opened_at = index
        self._open = OpenWindow(
            self._start + index, decision.target_token_id, window.following, decision.gap_nats
        )

    def verdict(
        self,
        decisions: Sequence[Decision],
        next_token_id: int,
        rejected: bool = False,
        final: bool = False,
    ) -> Verdict:
        """Return the verdict; a window open at a rejection or the end of the sequence has failed.

        `decisions` are those on the drafts reached, of which the last one may be `rejected`;
        `next_token_id` is the target's own token after the accepted ones. `final` means that no
        window can close any more, at an EOS or because nothing was drafted.

        With a failed window the verdict is as if its token had been rejected, in this round or in
        the earlier one where it was drafted. Otherwise an open window stays open and its token is
        provisional.
        """
        found, start, window, at = [*decisions], self._start, self._open, self._opened_at
        end = start + len(found) - rejected
        if window is not None and (rejected or final):
            end, next_token_id = window.position, window.target_token_id
            if at is not None:
                found[at:] = [found[at]._replace(outcome=Outcome.REJECTED)]
            window = None
        elif window is not None and at is not None:
            found[at] = found[at]._replace(outcome=Outcome.PROVISIONAL)
        return Verdict(end, next_token_id, tuple(found), window, start)
