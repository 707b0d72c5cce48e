"""A branch of what is drafted ahead of verdicts, and the chains that branches make in sessions."""

from __future__ import annotations

from typing import NamedTuple

from draft_service.drafters.base import DrafterSession, Foresight, SecondChoice
from flyspec.values.tokens import Drafted


class AheadRequest(NamedTuple):
    """The request that a branch is drafted for."""

    round_id: int
    max_tokens: int
    arrival_ns: int


class Branch:
    """Drafts behind `keep_length` tokens and `next_token_id`; `made` grows.

    It follows the branch `behind`, and has the estimated probability `chance`. The root, without
    one, is the proposal that is verified.
    """

    def __init__(
        self,
        ahead_id: int,
        behind: Branch | None,
        keep_length: int,
        next_token_id: int,
        chance: float,
        asked: AheadRequest,
    ) -> None:
        self.ahead_id, self.behind = ahead_id, behind
        self.keep_length, self.next_token_id = keep_length, next_token_id
        self.chance, self.asked = chance, asked
        self.made, self.model_ns = Drafted([]), 0
        self.ended = False
        """True if the drafter stopped by itself, so that there can be no more."""
        self.sent = False
        self.seen: Foresight | None = None
        self.choices: list[SecondChoice] = []
        """Those in `seen` that are to become branches yet, likeliest last."""

    @property
    def on(self) -> tuple[int, int]:
        return self.keep_length, self.next_token_id

    @property
    def is_first(self) -> bool:
        """True if it follows the proposal."""
        return self.behind is not None and self.behind.behind is None

    def add(self, drafted: Drafted) -> None:
        self.made = self.made.joined(drafted)

    def follows(self, other: Branch) -> bool:
        """True if this is the other branch, or one that follows it."""
        return self is other or (self.behind is not None and self.behind.follows(other))


class Chain:
    """A session and the branches in it, each behind the one before."""

    def __init__(self, session: DrafterSession, first: Branch) -> None:
        self.session, self.branches = session, [first]

    def close(self) -> None:
        self.session.close()
