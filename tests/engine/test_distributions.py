"""Draft distributions: the one sent equals the one drawn from and the one read."""

import math
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flyspec.engine.distributions import check_received, decode, encode, round_off
from flyspec.engine.logits import process_logits
from flyspec.engine.sampling import DRAFT_STREAM, sample_among
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams, TokenDistribution
from tests.examples import examples

V = 40


def rows_of(seed, rows, vocab_size=V):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def halves(*values):
    return struct.pack(f"<{len(values)}e", *values)


def dense(found, vocab_size=V):
    """Probabilities over the whole vocabulary, float64 [K, V]."""
    if found.token_ids is None:
        return found.log_probs.double().exp()
    rows = torch.zeros(len(found.log_probs), vocab_size, dtype=torch.float64)
    return rows.scatter_add(1, found.token_ids, found.log_probs.double().exp())


def test_the_whole_vocabulary_travels_as_half_floats():
    logits = rows_of(0, 3)
    sent = encode(logits, DistributionSpec())
    expected = logits.double().log_softmax(-1)
    for distribution, row in zip(sent, expected, strict=True):
        assert distribution.token_ids == ()
        assert len(distribution.log_probs) == 2 * V
        got = struct.unpack(f"<{V}e", distribution.log_probs)
        # Half a unit in the last of ten bits.
        assert got == pytest.approx(row.tolist(), rel=2**-11 + 1e-6)
    read = decode(sent, [0, 1, 2], V, renormalise=False)
    assert read.token_ids is None
    assert torch.equal(read.log_probs, logits.log_softmax(-1).half().float())


def test_the_most_likely_tokens_keep_their_share_unless_drawn_from():
    logits = rows_of(1, 2)
    p = logits.double().softmax(-1)
    (first, second) = encode(logits, DistributionSpec(top_k=5))
    for row, distribution in enumerate((first, second)):
        assert distribution.token_ids == tuple(p[row].topk(5).indices.tolist())
        got = struct.unpack("<5e", distribution.log_probs)
        assert got == pytest.approx(p[row].topk(5).values.log().tolist(), rel=1e-3)
    read = decode([first, second], first.token_ids[:1] + second.token_ids[:1], V, renormalise=False)
    torch.testing.assert_close(dense(read).sum(-1), p.topk(5).values.sum(-1), rtol=5e-3, atol=0)
    drawn_from = encode(logits, DistributionSpec(5, draw_from_it=True))
    for distribution in drawn_from:
        total = sum(math.exp(x) for x in struct.unpack("<5e", distribution.log_probs))
        assert total == pytest.approx(1, abs=5e-3)


def test_tokens_of_probability_zero_are_not_listed():
    processed = process_logits(rows_of(3, 4), SamplingParams(1.0, top_k=3))
    for spec in (DistributionSpec(10), DistributionSpec(10, True), DistributionSpec(0, True)):
        assert [len(q.token_ids) for q in encode(processed, spec)] == [3] * 4
    # Not to be drawn from: what was asked for is the whole vocabulary.
    assert {len(q.log_probs) for q in encode(processed, DistributionSpec())} == {2 * V}
    # A list of most of the vocabulary would be longer than the vocabulary.
    most = process_logits(rows_of(3, 4), SamplingParams(1.0, top_k=V - 2))
    assert {q.token_ids for q in encode(most, DistributionSpec(0, True))} == {()}


def test_half_precision_logits_are_computed_in_float32():
    logits = rows_of(4, 3).bfloat16()
    for spec in (DistributionSpec(), DistributionSpec(7)):
        assert encode(logits, spec) == encode(logits.float(), spec)


SAMPLINGS = st.sampled_from([
    SamplingParams(1.0), SamplingParams(0.5), SamplingParams(0.7, top_p=0.9),
    SamplingParams(1.5, top_k=4), SamplingParams(1.0, min_p=0.2), SamplingParams(0.05),
])  # fmt: skip


@given(SAMPLINGS, st.sampled_from([0, 1, 3, 20, 1024]), st.integers(0, 10**6), st.integers(1, 16))
@settings(max_examples=examples(25))
def test_what_is_drawn_from_is_what_is_read(sampling, top_k, seed, rows):
    processed = process_logits(rows_of(seed, rows), sampling)
    spec, positions = DistributionSpec(top_k, draw_from_it=True), range(50, 50 + rows)
    rounded = round_off(processed, spec)
    tokens = rounded.draw(positions, seed).tolist()
    sent = rounded.encode()
    assert sent == encode(processed, spec)
    assert rounded.encode(1) == sent[:1]
    read = decode(sent, tokens, V, renormalise=True)
    again = sample_among(read.log_probs, read.token_ids, positions, seed, DRAFT_STREAM)
    assert again.tolist() == tokens
    # A row alone, whatever the padding of the others, and in what the receiver knows of it.
    for row in range(rows):
        alone = round_off(processed[row : row + 1], spec)
        assert alone.draw([50 + row], seed).tolist() == tokens[row : row + 1]
        one = decode(alone.encode(), tokens[row : row + 1], V, renormalise=True)
        # Unless another row is too long to be listed.
        if (alone.token_ids is None) == (rounded.token_ids is None):
            assert torch.equal(dense(one)[0], dense(read)[row])
    sums = dense(read).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
    # Close to the distribution asked for: log-probabilities keep eleven bits.
    if not top_k:
        wanted = processed.double().softmax(-1)
        assert (dense(read) - wanted).abs().sum(-1).max() < 0.02


def test_empty_distributions_are_point_masses():
    for renormalise in (False, True):
        read = decode([TokenDistribution()] * 3, [4, 9, 0], V, renormalise=renormalise)
        assert read.token_ids is not None
        assert read.log_probs.shape == (3, 1)
        assert torch.equal(dense(read), torch.eye(V, dtype=torch.float64)[[4, 9, 0]])
        none = decode([], [], V, renormalise=renormalise)
        assert none.log_probs.shape[0] == 0


@pytest.mark.parametrize("renormalise", [False, True])
def test_forms_are_mixed(renormalise):
    logits = rows_of(7, 3)
    (whole,) = encode(logits[:1], DistributionSpec())
    (few,) = encode(logits[1:2], DistributionSpec(3))
    (more,) = encode(logits[2:3], DistributionSpec(8))
    drafts = [few.token_ids[1], more.token_ids[0], 11, 5]
    listed = decode([few, more, TokenDistribution()], drafts[:3], V, renormalise=renormalise)
    assert listed.token_ids is not None
    assert listed.log_probs.shape == listed.token_ids.shape == (3, 8)
    assert dense(listed)[2].tolist() == [float(i == 11) for i in range(V)]
    with_point = decode([TokenDistribution(), whole], [11, 5], V, renormalise=renormalise)
    assert with_point.token_ids is None
    assert torch.equal(dense(with_point)[0], dense(listed)[2])
    if renormalise:
        every = decode([few, more, TokenDistribution(), whole], drafts, V, renormalise=True)
        assert every.token_ids is None
        assert torch.equal(dense(every)[:3], dense(listed))
        assert torch.equal(dense(every)[3], dense(with_point)[1])
    else:
        with pytest.raises(InvalidArgumentError, match="send all in one form"):
            decode([few, whole], drafts[:2], V, renormalise=False)


def listed(values, token_ids):
    return TokenDistribution(halves(*values), tuple(token_ids))


WRONG = [
    ("too short", TokenDistribution(b"\0" * (2 * V - 2)), "78 bytes for 40 tokens of the voc"),
    ("odd", TokenDistribution(b"\0" * 81), "81 bytes for 40"),
    ("too few", TokenDistribution(halves(-1.0), (3, 4)), "2 bytes for 2 token_ids"),
    ("ids alone", TokenDistribution(b"", (3, 4)), "0 bytes for 2 token_ids"),
    ("id", listed([-1, -1], [4, V]), f"token_ids must be between 0 and {V - 1}, got {V}"),
    ("twice", listed([-1, -1], [4, 4]), "listed twice"),
    ("NaN listed", listed([-1, math.nan], [4, 5]), "NaN, "),
    ("inf listed", listed([math.inf, -1], [4, 5]), "NaN, "),
    ("nothing listed", listed([-math.inf], [4]), "no token of non-zero probability"),
    ("NaN", TokenDistribution(halves(*[-3.0] * (V - 1), math.nan)), "NaN, "),
    ("inf", TokenDistribution(halves(math.inf, *[-3.0] * (V - 1))), "NaN, "),
    ("nothing", TokenDistribution(halves(*[-math.inf] * V)), "no token of non-zero"),
]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("case", WRONG, ids=[w[0] for w in WRONG])
def test_what_makes_no_sense_is_refused(case, renormalise):
    _, distribution, message = case
    (good,) = encode(rows_of(8, 1), DistributionSpec(0 if not distribution.token_ids else 2, True))
    draft = good.token_ids[0] if good.token_ids else 4
    with pytest.raises(InvalidArgumentError, match=r"distributions\[1\]") as error:
        decode([good, distribution], [draft, 4], V, renormalise=renormalise)
    assert message in str(error.value)
    with pytest.raises(InvalidArgumentError, match="distributions: 1 for 2 drafted tokens"):
        decode([good], [1, 2], V, renormalise=renormalise)


@given(st.lists(st.integers(0, 0xFFFF), min_size=V, max_size=V))
@settings(max_examples=examples(50))
def test_every_pattern_of_bits_is_judged_by_its_number(bits):
    """Of all half floats, exactly those up to 0 (within rounding) are log-probabilities."""
    log_probs = struct.pack(f"<{V}H", *bits)
    values = struct.unpack(f"<{V}e", log_probs)
    good = all(value <= 1e-3 for value in values)  # NaN is not
    if good:
        check_received([TokenDistribution(log_probs)], V)
    else:
        with pytest.raises(InvalidArgumentError, match=r"NaN|above 0"):
            check_received([TokenDistribution(log_probs)], V)


def test_a_token_that_cannot_have_been_drawn_is_refused():
    (few,) = encode(rows_of(9, 1), DistributionSpec(3, True))
    missing = next(i for i in range(V) if i not in few.token_ids)
    zero = TokenDistribution(halves(*[-3.0] * (V - 1), -math.inf))
    for distribution, token in ((few, missing), (zero, V - 1)):
        decode([distribution], [token], V, renormalise=False)
        with pytest.raises(InvalidArgumentError, match=f"token {token} has probability 0"):
            decode([distribution], [token], V, renormalise=True)


def test_without_renormalising_a_draft_of_probability_zero_does_not_hide_what_is_wrong():
    good = TokenDistribution(halves(-math.inf, *[-3.0] * (V - 1)))
    nothing = TokenDistribution(halves(*[-math.inf] * V))
    with pytest.raises(InvalidArgumentError, match=r"distributions\[1\].log_probs: NaN"):
        decode([good, nothing], [0, 0], V, renormalise=False)
    with pytest.raises(InvalidArgumentError, match=r"distributions\[0\]: .* probability 0"):
        decode([good, nothing], [0, 0], V, renormalise=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_gpu_reads_the_same(top_k):
    processed = rows_of(11, 4)
    sent = encode(processed.cuda(), DistributionSpec(top_k, True))
    tokens = [q.token_ids[0] if q.token_ids else 3 for q in sent]
    on_cpu = decode(sent, tokens, V, renormalise=True)
    on_gpu = decode(sent, tokens, V, renormalise=True, device="cuda")
    assert on_gpu.log_probs.device.type == "cuda"
    torch.testing.assert_close(on_gpu.log_probs.cpu(), on_cpu.log_probs, rtol=1e-5, atol=1e-6)
