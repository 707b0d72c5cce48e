"""Where a relay's head hands over to a draft service."""

from __future__ import annotations

import pytest

from flyspec.values.rounds import DraftChunk
from flyspec.values.tokens import Origin
from orchestrator.generation.head_drafts import MAX_BLOCK, Handover


def block(confidences, start=10):
    tokens = list(range(100, 100 + len(confidences)))
    origins = [Origin.EXACT_MODEL] * len(tokens)
    return DraftChunk(
        start_position=start, token_ids=tokens, origins=origins, confidences=confidences
    )


def length(handover, *confidences):
    return len(handover.kept(block(confidences)).token_ids)


def test_the_head_goes_on_while_it_is_sure():
    handover = Handover()
    assert length(handover, 0.9, 0.8, 0.79, 0.9) == 2
    assert length(handover, 0.4, 0.9) == 0
    assert length(handover, *[1.0] * 9) == MAX_BLOCK
    assert length(handover) == 0


def hand_over(handover, confidence, of_service, follows):
    """Hand over at a second token, and let the text go on with these tokens behind position 10."""
    whole = block([0.95, confidence])
    kept = handover.kept(whole)
    assert len(kept.token_ids) == 1
    handover.handed(whole, kept, of_service)
    handover.learn([*range(10), *follows])


def test_the_head_goes_on_where_it_has_been_right_more_often():
    handover = Handover()
    hand_over(handover, 0.6, 7, [100, 101])  # the head's token was right
    assert length(handover, 0.6, 0.79) == 2
    assert length(handover, 0.6, 0.49) == 1  # a class of its own
    hand_over(handover, 0.3, 7, [100, 7])
    hand_over(handover, 0.3, 7, [100, 101])
    assert length(handover, 0.3) == 0
    hand_over(handover, 0.3, 7, [100, 101])
    assert length(handover, 0.3) == 1


@pytest.mark.parametrize(
    ("of_service", "follows"),
    [
        (7, [99, 101]),  # an earlier token was rejected
        (7, [100]),  # the sequence ends before the place
        (101, [100, 101]),  # both had the same token
        (7, [100, 5]),  # neither was right
    ],
)
def test_nothing_is_learnt_where_neither_was_better(of_service, follows):
    handover = Handover()
    hand_over(handover, 0.6, of_service, follows)
    assert length(handover, 0.6) == 0


def test_nothing_is_learnt_twice_or_of_a_whole_block():
    handover = Handover()
    hand_over(handover, 0.6, 7, [100, 101])
    hand_over_again = [*range(10), 100, 7]
    handover.learn(hand_over_again)
    assert length(handover, 0.6) == 1
    whole = block([0.9] * (MAX_BLOCK + 1))
    handover.handed(whole, handover.kept(whole), 7)
    handover.learn([*range(10), *range(100, 105), 7])
    assert length(handover, 0.6) == 1
