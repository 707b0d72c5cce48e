"""Prompt lookup inside the orchestrator: the drafter that needs no service."""

from __future__ import annotations

from flyspec.lookup import PromptLookup
from flyspec.prefix import TokenSequence
from flyspec.values.tokens import Origin, TokenDistribution
from orchestrator.upstreams.draft import Proposal


class LocalLookup:
    """Proposes where text repeats.

    With `distributions`, says of every token that all of the probability is on it.
    """

    def __init__(self, distributions: bool = False) -> None:
        self._lookup = PromptLookup()
        self._distributions = distributions

    def propose(self, sequence: TokenSequence, max_tokens: int) -> Proposal:
        """Up to `max_tokens` tokens to follow `sequence`."""
        self._lookup.extend(sequence.tokens[len(self._lookup) :])
        token_ids = self._lookup.propose(max_tokens)
        count = len(token_ids)
        return Proposal(
            token_ids,
            [Origin.EXACT_LOOKUP] * count,
            distributions=[TokenDistribution()] * (count if self._distributions else 0),
        )

    def accept(self, length: int) -> None:
        """The first `length` tokens of the sequence stand."""
        self._lookup.truncate(min(length, len(self._lookup)))
