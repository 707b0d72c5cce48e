"""Where a generation's drafts come from: the draft service, or prompt lookup here when it fails."""

from __future__ import annotations

import logging
from typing import Protocol

from flyspec.errors import FlyspecError
from flyspec.lookup import PromptLookup
from flyspec.prefix import TokenSequence
from flyspec.types import Origin, TokenDistribution
from orchestrator.upstreams import Proposal

log = logging.getLogger(__name__)

FALLBACK_NAME = "prompt_lookup"
NEVER = b"\xff\xfb"
"""The least half float, -65504: a probability of 0 whose divergence is yet finite."""


class Drafter(Protocol):
    """Something that proposes continuations of one growing sequence."""

    async def propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        """Up to `max_tokens` tokens to follow `sequence`."""
        ...

    def accept(self, length: int) -> None:
        """The first `length` tokens of sequence and last proposal stand."""
        ...

    def close(self) -> None:
        """Free what the drafter holds."""
        ...


class LocalLookup:
    """Prompt lookup inside the orchestrator: needs no service, proposes where text repeats.

    With `distributions`, says of every token that all of the probability is on it.
    """

    def __init__(self, distributions: bool = False) -> None:
        self._lookup = PromptLookup()
        self._distributions = distributions

    async def propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        """See `Drafter`."""
        self._lookup.extend(sequence.tokens[len(self._lookup) :])
        token_ids = self._lookup.propose(max_tokens)
        count = len(token_ids)
        return Proposal(
            token_ids,
            [Origin.EXACT_LOOKUP] * count,
            distributions=[TokenDistribution()] * (count if self._distributions else 0),
        )

    def accept(self, length: int) -> None:
        """See `Drafter`."""
        self._lookup.truncate(min(length, len(self._lookup)))

    def close(self) -> None:
        """See `Drafter`."""


class Drafting:
    """A generation's drafter, replaced by prompt lookup for its remainder once it fails.

    `distributions`: proposals come with the drafter's distributions.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, distributions: bool = False) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._distributions = distributions

    async def propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        """See `Drafter`; never fails for the drafter's sake.

        Ends before a token that the target does not have, and distributions cover the target's
        tokens: equal tokenizers may be padded to vocabularies of different sizes.
        """
        if max_tokens <= 0:
            return Proposal()
        proposal = await self._propose(sequence, max_tokens, round_id)
        if max(proposal.token_ids, default=0) >= self._vocab_size:
            end = next(i for i, t in enumerate(proposal.token_ids) if t >= self._vocab_size)
            del proposal.token_ids[end:], proposal.origins[end:], proposal.distributions[end:]
        if proposal.distributions:
            proposal.distributions = [fit(q, self._vocab_size) for q in proposal.distributions]
        return proposal

    async def _propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        try:
            return await self._drafter.propose(sequence, max_tokens, round_id)
        except FlyspecError as error:
            if isinstance(self._drafter, LocalLookup):
                raise
            log.warning("drafter lost, going on with prompt lookup: %s", error)
            self._drafter.close()
            self._drafter = LocalLookup(self._distributions)
            return await self._drafter.propose(sequence, max_tokens, round_id)

    def accept(self, length: int) -> None:
        """See `Drafter`."""
        self._drafter.accept(length)

    def close(self) -> None:
        """See `Drafter`."""
        self._drafter.close()


def fit(distribution: TokenDistribution, vocab_size: int) -> TokenDistribution:
    """A drafter's distribution over a vocabulary of `vocab_size` tokens.

    Tokens beyond it are left out: a draft that is none of them was drawn from the others in
    proportion. Tokens that the drafter does not have get `NEVER`. The same object if it fits.
    """
    log_probs, token_ids = distribution
    if token_ids:
        if max(token_ids) < vocab_size:
            return distribution
        kept = [i for i, token in enumerate(token_ids) if token < vocab_size]
        values = b"".join(log_probs[2 * i : 2 * i + 2] for i in kept)
        return TokenDistribution(values, tuple(token_ids[i] for i in kept))
    size = len(NEVER) * vocab_size
    if not log_probs or len(log_probs) == size:
        return distribution
    return TokenDistribution(log_probs[:size] + NEVER * ((size - len(log_probs)) // len(NEVER)))
