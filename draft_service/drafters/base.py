"""The drafter protocol: a drafter opens sessions, and a session drafts as a generator of work.

A proposal requests model steps instead of running them, so that its driver can batch the steps of
many sessions into one forward. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from flyspec.engine.model import Draw
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, still_needed


class Scored(NamedTuple):
    """True if the drafter would have proposed each of the last tokens of a sequence."""

    agreements: Sequence[bool]


Drafting: TypeAlias = Generator[Draw | Drafted | Scored, Drafted, None]
"""A proposal in progress. Send back the drawn tokens, perhaps fewer than its `max_tokens`, for each
`Draw` that it yields, and nothing for anything else, which is output."""


class DrafterSession(Protocol):
    """One sequence and its cache. Used by one thread at a time."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence, including as much of the last proposal as was made."""

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Set the sequence to its first `keep_length` tokens followed by `append_token_ids`.

        The lengths have been checked (`check_move`).
        """

    def learn(self, top: TopTokens) -> None:
        """Note what the target would have said in a round before the move that follows."""

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose up to `max_tokens` next tokens, which become part of the sequence.

        Proposes fewer, or none, at the end of the context, after an end-of-text token, without a
        guess, and after the token with which the probability of the whole proposal falls below
        `min_confidence`. First scores the last `num_scored` tokens of the sequence, if it can.
        Closing the generator early leaves the session usable.
        """

    def close(self) -> None:
        """Release what the session holds."""


class SecondChoice(NamedTuple):
    """The drafter's second choice after the first `keep_length` tokens, and the probability that
    the target accepts what it proposed up to there and prefers this, as it estimates it."""

    keep_length: int
    token_id: int
    chance: float


class Foresight(NamedTuple):
    """A drafter's expectation of the verdict on its proposal.

    `guess` is its own next token, None if the text ends before it, and `chance` the probability
    that the target accepts everything and goes on with it, as it estimates it; `choices` are its
    second ones at the proposed tokens and behind them, likeliest first.
    """

    guess: int | None
    chance: float
    choices: Sequence[SecondChoice]


class ForeseeingSession(DrafterSession, Protocol):
    """A session that knows where it was unsure."""

    def foresee(self, num_proposed: int) -> Generator[Draw, Drafted, Foresight]:
        """Return what it expects of a verdict on the last `num_proposed` tokens."""


@runtime_checkable
class TreeSession(DrafterSession, Protocol):
    """The session of a drafter that makes trees."""

    def propose_tree(
        self, max_tokens: int, max_tree_tokens: int, min_confidence: float = 0.0
    ) -> Drafting:
        """Propose a tree of up to `max_tree_tokens`, with paths of up to `max_tokens`, at once.

        No tree becomes part of the sequence. A tree that is a chain is proposed as one, and does.
        Nothing follows a token that the text goes through less likely than `min_confidence`.
        """


class Drafter(Protocol):
    """A way of drafting.

    If its `info` offers proposals ahead, its sessions are `ForeseeingSession`s.
    """

    @property
    def info(self) -> DrafterInfo:
        """The drafter's entry in `Describe`."""

    @property
    def needs_model(self) -> bool:
        """True if proposals yield draws; if so, sessions live in the engine's thread."""

    @property
    def max_length(self) -> int:
        """Maximum sequence length of a session, in tokens (0: no limit)."""

    def open(self, open_: DraftOpen) -> DrafterSession:
        """Start a session on a checked sequence. Raises `ResourceExhaustedError` without a slot."""


def sure(min_confidence: float, confidences: Sequence[float], count: int) -> int:
    """Return how many of `count` tokens to keep, up to the one that makes them too unsure."""
    for index in range(len(confidences)):
        min_confidence = still_needed(min_confidence, confidences[index : index + 1])
        if min_confidence > 1:
            return index + 1
    return count


def check_move(held: int, keep_length: int, num_appended: int) -> None:
    """Reject a move that a session holding `held` tokens cannot make.

    Raises `PrefixMismatchError` for a longer prefix than is held, `InvalidArgumentError` if
    nothing would remain.
    """
    if keep_length > held:
        raise PrefixMismatchError(
            f"advance.keep_length is {keep_length} but this session holds {held} tokens "
            "(sequence and last proposal); open a new session with the whole sequence"
        )
    if keep_length + num_appended == 0:
        raise InvalidArgumentError(
            "advance: the sequence is empty; keep or append at least one token"
        )
