"""Decides whether a text is drafted from its start, by what is known of the drafter. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from orchestrator.generation.experience import Experience
from orchestrator.generation.following import FOLLOWING_DRAFTS
from orchestrator.generation.text_evidence import TextEvidence

ENTER_AT_ONCE = 1.2
"""Multiple of plain decoding's tokens/s that drafting must promise, by the evidence of other texts,
to begin with the second token."""
SAMPLE_TOKENS = 32
"""Tokens behind the first one of a text that times plain decoding."""


class Beginning(NamedTuple):
    """How a text begins: with rounds of `k` drafts (0: plainly), at `rate` tokens per ns.

    They are `judged` by whether they save time, unless they are to try the drafter. Before them,
    `num_plain` tokens are decoded plainly: the first one, and more of them to time that.
    """

    k: int = 0
    rate: float = 0.0
    judged: bool = False
    num_plain: int = 1


def beginning(experience: Experience, text: TextEvidence) -> Beginning:
    """Decide how a text begins, of which nothing is known yet."""
    drafter = text.drafter
    if not (experience.may_draft and (drafter.is_known or drafter.is_on_trial)):
        return Beginning()
    k, rate = text.hoped()
    if drafter.is_on_trial:  # what counts is measured
        return Beginning(min(k, FOLLOWING_DRAFTS), 1.0 / experience.plain_ns)
    if rate * experience.plain_ns < ENTER_AT_ONCE:
        return Beginning()
    drafts = drafter.at_once.next()
    if drafts or drafter.at_once.samples_plain:
        timed = 0 if drafts else math.ceil(text.lasting(SAMPLE_TOKENS))
        return Beginning(k, rate, judged=True, num_plain=1 + timed)
    return Beginning()
