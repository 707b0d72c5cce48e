"""Selects the drafts of several rounds that a step checks: those that are worth their cost.

Like vLLM's `adaptive_verification` for exact acceptance: every drafted position has a probability
of being reached and accepted, and the most likely across all rounds of the step are admitted, as
long as the step yields more tokens per second for it. Here the probabilities are the sender's
estimates under the request's own rule. Pure, without torch.

What follows the first draft that does not pay is not looked at, though it might pay together with
it: what follows a draft tells what that draft is, and a rule that draws is bent by leaving tokens
out for what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from flyspec.step_costs import StepCosts


def admit(survivals: Sequence[Sequence[float]], num_tokens: int, costs: StepCosts) -> list[int]:
    """Return how many drafts of each round a step checks.

    `survivals` holds the drafts' probabilities per round, empty if all are to be checked; with all
    drafts the step has `num_tokens`. A round's drafts are admitted in order, never before a more
    likely draft of another round. Leaving a draft out saves `costs` and forfeits its probability.
    """
    counts = [0] * len(survivals)
    size = num_tokens - sum(map(len, survivals))
    # Every round yields a token of its own, and so does every plain step.
    expected = float(len(survivals))
    heap = [(-chances[0], index) for index, chances in enumerate(survivals) if chances]
    heapify(heap)
    while heap:
        chance, index = heappop(heap)
        if (expected - chance) / costs(size + 1) < expected / costs(size):
            break
        counts[index] += 1
        size += 1
        expected -= chance
        chances = survivals[index]
        if counts[index] < len(chances):
            heappush(heap, (-min(chances[counts[index]], -chance), index))
    return counts
