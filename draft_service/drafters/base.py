"""What a drafter is: it opens sessions, and a session drafts as a generator of work.

A proposal asks for model steps instead of running them, so whoever drives it may batch the steps of
many sessions into one forward. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from flyspec.engine.model import Draw
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted


class Scored(NamedTuple):
    """Of the last tokens of a sequence, whether the drafter would have proposed each."""

    agreements: Sequence[bool]


Drafting: TypeAlias = Generator[Draw | Drafted | Scored, Drafted, None]
"""A proposal in the making. Each `Draw` that it yields wants what was drawn sent back, which may
be less than its `max_tokens`; all else is output and wants nothing back."""


class DrafterSession(Protocol):
    """One sequence and what is cached of it. Used by one thread at a time."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence with the last proposal, as far as it was made."""

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Set the sequence to its first `keep_length` tokens followed by `append_token_ids`.

        The lengths have been checked (`check_move`).
        """

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose up to `max_tokens` tokens that follow; they become part of the sequence.

        May propose fewer, or none: at the context's end, behind an end-of-text token, for want of
        a guess, and behind the token with which the probability of the whole proposal falls below
        `min_confidence`. Before that, scores the last `num_scored` tokens of the sequence, if it
        can. Closing the generator early leaves the session usable.
        """

    def close(self) -> None:
        """Give back what the session holds."""


class Drafter(Protocol):
    """A way of drafting."""

    @property
    def info(self) -> DrafterInfo:
        """What `Describe` says of it."""

    @property
    def needs_model(self) -> bool:
        """Whether its proposals yield draws; if so its sessions live in the engine's thread."""

    @property
    def max_length(self) -> int:
        """The longest sequence of a session, in tokens; 0 if there is no limit."""

    def open(self, open_: DraftOpen) -> DrafterSession:
        """Start a session on a checked sequence. Raises `ResourceExhaustedError`: no free slot."""


def check_move(held: int, keep_length: int, num_appended: int) -> None:
    """Refuse a move that a session holding `held` tokens cannot make.

    Raises `PrefixMismatchError` for a longer prefix than is held, `InvalidArgumentError` if
    nothing would remain.
    """
    if keep_length > held:
        raise PrefixMismatchError(
            f"advance.keep_length: {keep_length} tokens, but this session holds {held} "
            "(sequence and last proposal); open a new session with the whole sequence"
        )
    if keep_length + num_appended == 0:
        raise InvalidArgumentError(
            "advance: keeps and appends nothing; a sequence needs at least one token"
        )
