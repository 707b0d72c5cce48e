"""Decides whether a text is drafted from its start, by what is known of the drafter. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from flyspec.rules.room import ANYWHERE, Room
from orchestrator.generation.experience import DrafterExperience, Experience
from orchestrator.generation.speedup import hoped_k, lasting

ENTER_AT_ONCE = 1.2
"""Multiple of plain decoding's tokens/s that drafting must promise, by the evidence of other texts,
to begin with the second token."""
FOLLOWING_DRAFTS = 15
"""Maximum drafts of a proposal that is made during plain decoding."""
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


def beginning(
    experience: Experience, drafter: DrafterExperience, most: int, room: Room = ANYWHERE
) -> Beginning:
    """Decide how the next text begins, with up to `most` drafts per round."""
    if not experience.may_draft:
        return Beginning()
    k, rate = hoped_k(experience, drafter, most, room)
    if drafter.is_on_trial:  # what counts is measured
        return Beginning(min(k, FOLLOWING_DRAFTS), 1.0 / experience.plain_ns)
    if not drafter.is_known or rate * experience.plain_ns < ENTER_AT_ONCE:
        return Beginning()
    drafts = drafter.at_once.next()
    if drafts or drafter.at_once.samples_plain:
        timed = 0 if drafts else math.ceil(lasting(SAMPLE_TOKENS, experience))
        return Beginning(k, rate, judged=True, num_plain=1 + timed)
    return Beginning()
