"""Self-drafting: rounds that a head of the target goes on with, without their being sent.

`HeadRequest.num_rounds` allows them. The verify service tells a verdict before the head drafts, and
begins the next round with what it drafts; the orchestrator, which knows from here what that round
is, hears its drafts with its verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyspec.values.rounds import Verdict, VerifyRound


def following_round(
    round_: VerifyRound, verdict: Verdict, draft_token_ids: Sequence[int] = ()
) -> VerifyRound:
    """Return the round that the head goes on with after a round's verdict."""
    head = round_.head
    assert head is not None
    return replace(
        round_,
        round_id=round_.round_id + 1,
        keep_length=verdict.keep_length + 1,
        append_token_ids=(),
        draft_token_ids=draft_token_ids,
        prefix_hash=0,
        max_plain_tokens=1,
        draft_survivals=(),
        budget=verdict.left_of(round_.budget),
        open_window=verdict.open_window,
        staged_on=None,
        head=head._replace(num_rounds=head.num_rounds - 1),
    )
