"""The orchestrator's own proposals, and fitting those of others to the target's vocabulary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from flyspec.drafter_names import LOOKUP
from flyspec.lookup import PromptLookup
from flyspec.values.rounds import DraftChunk
from flyspec.values.tokens import Origin, TokenDistribution
from orchestrator.upstreams.half_floats import all_impossible

NEVER = b"\xff\xfb"
"""The lowest half float, -65504: in effect probability 0, but with a finite divergence."""


def proposal_of(
    token_ids: Sequence[int], origin: Origin, drafter: str, distributions: bool
) -> DraftChunk:
    """Return tokens as a proposal; with `distributions`, each has a point mass on itself."""
    count = len(token_ids)
    return DraftChunk(
        token_ids=token_ids,
        origins=[origin] * count,
        distributions=[TokenDistribution()] * (count if distributions else 0),
        drafter=drafter,
        arrived_ns=time.perf_counter_ns(),
    )


class LocalLookup:
    """Prompt lookup inside the orchestrator: a drafter that needs no service."""

    def __init__(self, distributions: bool = False) -> None:
        self._lookup = PromptLookup()
        self._distributions = distributions

    def propose(self, tokens: Sequence[int], max_tokens: int) -> DraftChunk:
        self._lookup.extend(tokens[len(self._lookup) :])
        token_ids = self._lookup.propose(max_tokens)
        return proposal_of(token_ids, Origin.EXACT_LOOKUP, LOOKUP, self._distributions)

    def keep(self, length: int) -> None:
        self._lookup.truncate(length)


def fit_proposal(proposal: DraftChunk, vocab_size: int) -> DraftChunk:
    """Cut the proposal before the first token that the target does not have.

    Vocabularies of equal tokenizers may be padded to different sizes.
    """
    token_ids, end = proposal.token_ids, len(proposal.token_ids)
    if max(token_ids, default=0) >= vocab_size:
        end = next(i for i, token in enumerate(token_ids) if token >= vocab_size)
    elif not proposal.distributions:
        return proposal
    proposal = proposal.cut(0, end)
    return replace(proposal, distributions=[fit(q, vocab_size) for q in proposal.distributions])


def fit(distribution: TokenDistribution, vocab_size: int) -> TokenDistribution:
    """Fit a drafter's distribution to a vocabulary of `vocab_size` tokens.

    Tokens beyond it are dropped: a draft that is not one of them was drawn from the rest in
    proportion. Tokens that the drafter does not have get `NEVER`. Returns the same object if it
    already fits; a distribution with no probability on the target's tokens becomes a point mass.
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
