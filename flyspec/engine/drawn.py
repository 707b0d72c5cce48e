"""Results that a draw keeps of its tokens, and their form for `Model.draw`. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.engine.model import Draw
from flyspec.prefix import num_same
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, still_needed


def ends_after(draw: Draw, token_ids: Sequence[int], chances: Sequence[float]) -> int:
    """Return how many of a draw's tokens it keeps: up to a stop, or the one that makes it unsure.

    `chances` are the tokens' confidences.
    """
    left = draw.min_confidence
    for count, (token_id, chance) in enumerate(zip(token_ids, chances, strict=True), 1):
        if token_id in draw.stop_token_ids:
            return count
        left = still_needed(left, [chance])
        if left > 1:
            return count
    return len(token_ids)


def drafted(draw: Draw, token_ids: list[int], chances: list[float]) -> Drafted:
    """Return a draw's result; a requested distribution is a point mass on each token."""
    count = 0
    if draw.distribution is not None and token_ids:
        fed, several = draw.step.token_ids, draw.step.num_logits
        guess = fed[len(fed) - several + 1 :] if several > 1 else ()
        count = num_same(token_ids, guess) + 1 if several > 1 else len(token_ids)
    # An empty distribution puts all probability on the token.
    distributions = [TokenDistribution()] * count
    return Drafted(token_ids, [Origin.EXACT_MODEL] * len(token_ids), distributions, chances)
