"""Rules against a random allocation of problems between a large model and a small one.

Sending each problem to the small model with some probability, and else to the large one, trades
quality for speed as well. A rule is worth its name only above the straight line between the two
(the line that Fuzzy Speculative Decoding, arXiv 2502.20704, has to beat). The line is generous to
the allocation: mixing adds times, not speeds, so what it really gives bends below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flyspec_lab.answered import TIME, Answered
from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.curves import is_exact
from flyspec_lab.frontier import AtEqualSpeed, at_equal_speed


@dataclass(frozen=True)
class AllocationLead:
    """A condition's score less that of the line from `large` to `small` at its tokens per second.

    Where the condition is faster than the small model, that one's score counts. `at` is None where
    the condition is slower than the large model.
    """

    task: str
    condition: str
    large: str
    small: str
    at: AtEqualSpeed | None


def allocation_leads(answered: Answered) -> list[AllocationLead]:
    """Compare each lossy condition with the lines from plain and from exact decoding to the rival.

    Exact decoding is that with the same K and drafter. Empty without a rival or known answers.
    """
    small = next((arm for arm in answered.arms if arm.rival), None)
    if small is None or answered.bootstrap is None or not answered.has_answers:
        return []
    found = []
    for arm in answered.arms:
        if arm.rival or is_exact(arm):
            continue
        for large in large_ends(answered.arms, arm):
            at = at_equal_speed(
                answered.bootstrap,
                answered.curve([arm], TIME),
                answered.curve([large, small], TIME),
                beyond=True,
            )
            found.append(AllocationLead(answered.task, arm.name, large.name, small.name, at))
    return found


def large_ends(arms: list[Arm], arm: Arm) -> list[Arm]:
    """Return what may serve the large model's share: plain decoding, and exact speculation."""
    return [
        other
        for other in arms
        if other.name == PLAIN
        or (is_exact(other) and (other.k, other.drafter) == (arm.k, arm.drafter))
    ]
