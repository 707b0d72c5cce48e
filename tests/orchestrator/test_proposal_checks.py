"""What is accepted of a drafter's answer, chunk by chunk, and what is refused."""

from __future__ import annotations

import struct

import pytest

from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution
from orchestrator.upstreams.proposal_checks import LIMITS, Answer, DrafterFaultError, DraftFault


def answer_to(spec):
    """The answer to a request for two tokens after [3, 4], by a drafter with eight token IDs."""
    open_ = DraftOpen((3, 4), SamplingParams(), 0, distribution=spec, drafter_vocab_size=8)
    return Answer(DraftAdvance(1, 2, (), 2), open_, 4, 0)


def chunk_of(token, log_probs, ids=()):
    row = TokenDistribution(struct.pack(f"<{len(log_probs)}e", *log_probs), ids)
    return DraftChunk(1, 1, 4, 2, [token], [Origin.EXACT_MODEL], True, distributions=[row])


NEVER = float("-inf")


@pytest.mark.parametrize(
    ("token", "log_probs", "ids", "honest"),
    [
        (5, [-2.0] * 8, (), True),
        (5, [-2.0] * 5 + [NEVER] + [-2.0] * 2, (), False),
        (5, [-1.0, -2.0], (5, 6), True),
        (5, [-1.0, -2.0], (6, 7), False),
        (5, [-1.0, NEVER], (6, 5), False),
        (5, [], (), True),
    ],
)
def test_what_was_drawn_has_a_probability(token, log_probs, ids, honest):
    answer = answer_to(DistributionSpec(draw_from_it=True))
    chunk = chunk_of(token, log_probs, ids)
    if honest:
        answer.add(chunk, 1)
        assert answer.complete
        return
    with pytest.raises(DrafterFaultError, match="expected at most") as raised:
        answer.add(chunk, 1)
    assert raised.value.fault is DraftFault.DISTRIBUTIONS


@pytest.mark.parametrize("tokens", [[], [5]])
def test_of_endless_pieces_no_more_are_taken_than_asked_for(tokens):
    answer = answer_to(None)

    def take(number):
        place, origins = 2 + number * len(tokens), [Origin.EXACT_MODEL] * len(tokens)
        answer.add(DraftChunk(1, 1, 4, place, tokens, origins, last=False), 1)

    most = 2 * len(tokens)
    for number in range(most):
        take(number)
    with pytest.raises(DrafterFaultError):
        take(most)
    assert answer.proposal.token_ids == most * tokens


def test_a_message_is_measured_before_it_is_read():
    for spec, most in (
        (None, LIMITS.answer_bytes + 2 * LIMITS.token_bytes),
        (DistributionSpec(), LIMITS.answer_bytes + 2 * (LIMITS.token_bytes + 16)),
    ):
        answer = answer_to(spec)
        answer.check_size(most)
        with pytest.raises(DrafterFaultError, match=f"{most + 1}-byte message"):
            answer.check_size(most + 1)
