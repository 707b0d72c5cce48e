"""Proposals made to fit: into the target's vocabulary, or made here where no service drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyspec.lookup import PromptLookup
from flyspec.values.rounds import DraftChunk
from flyspec.values.tokens import Origin, TokenDistribution
from orchestrator.upstreams.half_floats import all_impossible

NEVER = b"\xff\xfb"
"""The least half float, -65504: a probability of 0 whose divergence is yet finite."""


class LocalLookup:
    """Prompt lookup inside the orchestrator, the drafter that needs no service.

    With `distributions`, says of every token that all of the probability is on it.
    """

    def __init__(self, distributions: bool = False) -> None:
        self._lookup = PromptLookup()
        self._distributions = distributions

    def propose(self, tokens: Sequence[int], max_tokens: int) -> DraftChunk:
        """Up to `max_tokens` tokens to follow `tokens`."""
        self._lookup.extend(tokens[len(self._lookup) :])
        token_ids = self._lookup.propose(max_tokens)
        count = len(token_ids)
        return DraftChunk(
            token_ids=token_ids,
            origins=[Origin.EXACT_LOOKUP] * count,
            distributions=[TokenDistribution()] * (count if self._distributions else 0),
        )

    def keep(self, length: int) -> None:
        """The sequence was cut back to `length` tokens."""
        self._lookup.truncate(min(length, len(self._lookup)))


def fit_proposal(proposal: DraftChunk, vocab_size: int) -> DraftChunk:
    """The proposal, which ends before a token that the target does not have.

    Equal tokenizers may be padded to different sizes.
    """
    token_ids, end = proposal.token_ids, len(proposal.token_ids)
    if max(token_ids, default=0) >= vocab_size:
        end = next(i for i, token in enumerate(token_ids) if token >= vocab_size)
    elif not proposal.distributions:
        return proposal
    proposal = proposal.cut(0, end)
    return replace(proposal, distributions=[fit(q, vocab_size) for q in proposal.distributions])


def fit(distribution: TokenDistribution, vocab_size: int) -> TokenDistribution:
    """A drafter's distribution over a vocabulary of `vocab_size` tokens.

    Tokens beyond it are left out: a draft that is none of them was drawn from the others in
    proportion. Tokens that the drafter does not have get `NEVER`. The same object if it fits; one
    that leaves none of the target's tokens possible becomes a point mass.
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
    if len(log_probs) > size and all_impossible(log_probs[:size]):
        return TokenDistribution()
    return TokenDistribution(log_probs[:size] + NEVER * ((size - len(log_probs)) // len(NEVER)))
