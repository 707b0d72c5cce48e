"""The cost of querying a drafter while the target decodes without drafts."""

from __future__ import annotations

from orchestrator.generation.experience import DrafterExperience
from orchestrator.generation.following import Overtaken

FOLLOWING_COST_NS = 3_000_000
"""Cost of a query on top of the drafter's own time, across all processes."""
READING_COST_NS = 8_000_000
"""Maximum counted for a query that reads the prompt, unless it delayed decoding by more."""


class Question:
    """A generation's query of its drafter, which has not yet read the prompt.

    `is_open` until it is answered.
    """

    def __init__(self, prompt_length: int) -> None:
        self.is_open = False
        self._unread, self._reads = prompt_length, 0
        self._has_read = False
        self._delay_ns = 0.0  # by which plain decoding was slowed

    def ask(self, num_tokens: int) -> None:
        """Start a query, `num_tokens` after the last one."""
        self.is_open, self._delay_ns = True, 0.0
        self._reads = self._unread + num_tokens

    def delayed(self, duration_ns: float) -> None:
        """Add a delay of plain decoding: querying the drafter may slow the target."""
        self._delay_ns += duration_ns

    def drafted(self) -> None:
        """Record a round with drafts, for which the drafter read the whole sequence."""
        self._unread = 0

    def cost_ns(self, num_tokens: int, drafter: DrafterExperience) -> float:
        """Return the expected cost of a query, in ns, `num_tokens` after the last one."""
        return FOLLOWING_COST_NS + (self._unread + num_tokens) * drafter.reading_ns.value

    def answered(self, overtaken: Overtaken, drafter: DrafterExperience) -> float:
        """Return the cost of the answered query, in ns, and update the drafter's experience."""
        proposal = overtaken.proposal
        spent_ns = float(FOLLOWING_COST_NS + proposal.timings.model_ns)
        if self._reads:
            reading_ns = max(0.0, self._delay_ns - FOLLOWING_COST_NS)
            drafter.reading_ns.observe(reading_ns, self._reads)
        if self._has_read:
            drafter.followed(proposal, overtaken.asked_ns)
        else:  # it read the prompt, alongside the target
            spent_ns = min(spent_ns, READING_COST_NS)
        self.is_open, self._has_read, self._unread = False, True, 0
        return max(spent_ns, self._delay_ns)
