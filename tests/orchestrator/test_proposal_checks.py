"""What is accepted of a drafter's answer, chunk by chunk, and what is refused."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution
from orchestrator.upstreams.half_floats import all_impossible, any_impossible, are_log_probs
from orchestrator.upstreams.proposal_checks import Answer, DrafterFaultError, DraftFault


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


PATTERNS = st.lists(
    st.integers(0, 0xFFFF)
    | st.sampled_from([0, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0xFC01, 0x1418, 0x1419, 0x141A, 0xFFFF]),
    max_size=12,
)
LIKELY = st.lists(st.integers(0x8000, 0xFC00), max_size=12)


@given(PATTERNS | LIKELY)
def test_each_is_looked_at(patterns):
    row = struct.pack(f"<{len(patterns)}H", *patterns)
    values = struct.unpack(f"<{len(patterns)}e", row)
    (rounding,) = struct.unpack("<e", struct.pack("<e", 1e-3))
    good = all(value <= rounding for value in values)  # NaN is not
    assert are_log_probs(row) == good
    if good:
        assert any_impossible(row) == (-math.inf in values)
        assert all_impossible(row) == all(value == -math.inf for value in values)
