"""Which drafts of several rounds a step checks: those whose chance is worth what they cost.

As vLLM's `adaptive_verification` for exact acceptance: every drafted position has its probability
to be reached and accepted, and the likeliest are admitted, over all rounds of the step, as long as
the step then yields more tokens a second. Here the probabilities are those of the request's own
rule, by the sender's estimate. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from flyspec.step_costs import StepCosts


def admit(survivals: Sequence[Sequence[float]], num_tokens: int, costs: StepCosts) -> list[int]:
    """How many drafts of each round a step checks.

    `survivals` are, a round, the chances of its drafts, none if all are to be checked; the step has
    `num_tokens` with all of them. A round's drafts are admitted in order, a less likely one never
    before a likelier one of another round. What is left out saves `costs`, and costs its chance.
    """
    counts = [0] * len(survivals)
    size = num_tokens - sum(map(len, survivals))
    # Every round gives its own next token, and so does every plain step.
    expected = float(len(survivals))
    best, best_rate = counts[:], expected / costs(size)
    heap = [(-chances[0], index) for index, chances in enumerate(survivals) if chances]
    heapify(heap)
    while heap:
        chance, index = heappop(heap)
        counts[index] += 1
        size += 1
        expected -= chance
        if (rate := expected / costs(size)) >= best_rate:
            best, best_rate = counts[:], rate
        chances = survivals[index]
        if counts[index] < len(chances):
            heappush(heap, (-min(chances[counts[index]], -chance), index))
    return best
