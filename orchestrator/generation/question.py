"""What it costs to ask a drafter something while the target decodes plainly. Pure."""

from __future__ import annotations

from orchestrator.generation.experience import DrafterExperience
from orchestrator.generation.following import Overtaken

FOLLOWING_COST_NS = 3_000_000
"""What asking takes on top of the drafter's own time, in all processes."""
READING_COST_NS = 8_000_000
"""The most that counts of its time where it read the prompt, unless decoding was held up longer."""


class Question:
    """Of one generation, whose drafter has not read the `prompt_length` tokens of its prompt.

    `is_open` until it is answered.
    """

    def __init__(self, prompt_length: int) -> None:
        self.is_open = False
        self._unread, self._reads = prompt_length, 0
        self._has_read = False
        self._delay_ns = 0.0  # of plain decoding

    def ask(self, num_tokens: int) -> None:
        """It is asked, `num_tokens` after the last time."""
        self.is_open, self._delay_ns = True, 0.0
        self._reads = self._unread + num_tokens

    def delayed(self, duration_ns: float) -> None:
        """Plain decoding took so much longer than usual: the target may be slower beside it."""
        self._delay_ns += duration_ns

    def drafted(self) -> None:
        """A round had drafts: so it has read all there was."""
        self._unread = 0

    def cost_ns(self, num_tokens: int, drafter: DrafterExperience) -> float:
        """What it is likely to cost, `num_tokens` after the last time."""
        return FOLLOWING_COST_NS + (self._unread + num_tokens) * drafter.reading_ns.value

    def answered(self, overtaken: Overtaken, drafter: DrafterExperience) -> float:
        """What it has cost, ns; tells the drafter's experience how long things took."""
        proposal = overtaken.proposal
        spent_ns = float(FOLLOWING_COST_NS + proposal.timings.model_ns)
        if self._reads:
            reading_ns = max(0.0, self._delay_ns - FOLLOWING_COST_NS)
            drafter.reading_ns.observe(reading_ns, self._reads)
        if self._has_read:
            drafter.followed(proposal, overtaken.asked_ns)
        else:  # the prompt, beside the target
            spent_ns = min(spent_ns, READING_COST_NS)
        self.is_open, self._has_read, self._unread = False, True, 0
        return max(spent_ns, self._delay_ns)
