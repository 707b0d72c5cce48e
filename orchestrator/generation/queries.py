"""When a drafter is queried while the target decodes without drafts, and what that costs. Pure."""

from __future__ import annotations

import math

from orchestrator.generation.experience import MOST_ALLOWANCE_NS, DrafterExperience
from orchestrator.generation.following import FOLLOWING_DRAFTS, Overtaken
from orchestrator.generation.text_evidence import TextEvidence

FOLLOWING_COST_NS = 3_000_000
"""Cost of a query on top of the drafter's own time, across all processes."""
READING_COST_NS = 8_000_000
"""Maximum counted for a query that reads the prompt, unless it delayed decoding by more."""
LATE = 1.05
"""Multiple of its usual time from which plain decoding counts as delayed by a query."""
DEARER, DEAREST = 0.25, 4.0
"""Increase of a query's price, as a factor, per fruitless query before it, and its maximum."""
WORTH = 2.0
"""Multiple of a query's cost that drafts must promise to save, since many queries are in vain."""
LEAST_DRAFTS = 8
"""Minimum drafts per query; up to `FOLLOWING_DRAFTS`, as many as the allowance covers."""
SHORT_REST, FIRST_REST, LONGEST_REST = 8, 32, 128
"""Tokens of plain decoding before the drafter is queried again: short after too little evidence,
else the first, which doubles up to the longest while drafting does not pay off."""
SELDOM = 1000
"""Tokens of plain decoding between queries in kinds of text where drafts do not pay off."""


class Queries:
    """A generation's queries of its drafter, which has not yet read the prompt.

    `is_open` while one is unanswered.
    """

    def __init__(self, prompt_length: int) -> None:
        self.is_open = False
        self._rest = FIRST_REST
        self._unread, self._reads = prompt_length, 0
        self._has_read = False
        self._delay_ns = 0.0  # by which plain decoding was slowed

    def num_drafts(self, text: TextEvidence, num_tokens: int) -> int:
        """Return how many drafts to ask for, `num_tokens` after the last query; 0: do not ask.

        Called very often, so expensive checks come last.
        """
        drafter, kind = text.drafter, text.kind
        if drafter.allowance_ns <= 0 or num_tokens < text.lasting(min(self._rest, SHORT_REST)):
            return 0
        if num_tokens < text.lasting(self._rest_in(text, num_tokens)):
            return 0
        if drafter.allowance_ns < MOST_ALLOWANCE_NS and not text.may_pay:
            return 0
        if kind:
            kind.num_unasked = 0
        self.is_open, self._delay_ns = True, 0.0
        self._reads = self._unread + num_tokens
        allowed = int(drafter.allowance_ns / max(1.0, drafter.draft_ns.value))
        return min(text.most, FOLLOWING_DRAFTS, max(LEAST_DRAFTS, allowed))

    def _rest_in(self, text: TextEvidence, num_tokens: int) -> float:
        """Return how many tokens to rest: few in kinds of text where drafts pay off.

        Infinitely many where a query, `num_tokens` after the last one, is likely to be in vain.
        """
        kind = text.kind
        if kind is None or not (kind.is_known or text.drafter.is_known):
            return self._rest
        cost_ns = self._cost_ns(num_tokens, text.drafter)
        if kind.is_known and text.gain_ns > cost_ns:
            return min(self._rest, SHORT_REST)
        if text.gain_ns:
            in_vain = text.likely_gain_ns < WORTH * cost_ns
        else:
            is_judged = kind.is_known or text.is_enough
            in_vain = is_judged and kind.num_unasked < text.lasting(SELDOM)
        return math.inf if in_vain else self._rest

    def _cost_ns(self, num_tokens: int, drafter: DrafterExperience) -> float:
        """Return the expected cost of a query, in ns, `num_tokens` after the last one."""
        return FOLLOWING_COST_NS + (self._unread + num_tokens) * drafter.reading_ns.value

    def delayed(self, round_ns: float, usual_ns: float) -> None:
        """Record the time of plain decoding during a query, which may slow the target."""
        self._delay_ns += round_ns - LATE * usual_ns

    def drafted(self) -> None:
        """Record a round with drafts, for which the drafter read the whole sequence."""
        self._unread = 0

    def answered(self, overtaken: Overtaken, drafter: DrafterExperience, plain_ns: float) -> None:
        """Take the cost of the answered query from the drafter's allowance; learn its times.

        A token of plain decoding takes `plain_ns`.
        """
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
        price = min(DEAREST, 1.0 + DEARER * drafter.num_in_vain)
        drafter.earn(-price * max(spent_ns, self._delay_ns), plain_ns)
        drafter.num_in_vain += 1

    def rest_briefly(self) -> None:
        """Ask again soon: little is known yet."""
        self._rest = min(self._rest, SHORT_REST)

    def rest(self, paid: bool) -> None:
        """Rest before the next query, longer each time, unless drafting `paid` off."""
        longer = min(LONGEST_REST, max(FIRST_REST, 2 * self._rest))
        self._rest = FIRST_REST if paid else longer
