"""Keyed sampling: fixed bits, no dependence on batches, the right distribution, coupling."""

import itertools
import math

import pytest
import torch

from flyspec.engine import sampling as streams
from flyspec.engine.distributions import round_off
from flyspec.engine.logits import process_logits
from flyspec.engine.model import History
from flyspec.engine.sampling import (
    NOT_FINITE,
    checked,
    choose_processed,
    keyed_noise,
    row_keys,
    sample,
    sample_among,
    uniform,
)
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.rules.rule_case import gumbel, uniforms

# (seed, position, stream): the bits of the float32 noise of tokens 0 to 5.
GOLDEN = {
    (0, 0, 0): [-1086922087, -1081310675, 1063949328, 1065244117, -1101931841, 1066446590],
    (0, 0, 1): [1072285796, -1090221438, 1047746270, 1086431517, 1050095175, -1105397899],
    (18446744073709551615, 4294967297, 0): [
        1053172181,
        1048567585,
        1061671593,
        1066833873,
        1065011231,
        1065939031,
    ],
}


def noise_of(vocab_size, positions, seed, stream=0, device="cpu"):
    return keyed_noise(torch.tensor(row_keys(seed, positions, stream), device=device), vocab_size)


def choose(logits, sampling, first, seed, stream=0, **before):
    positions = range(first, first + len(logits))
    processed = process_logits(logits, sampling, **before)
    return choose_processed(processed, sampling, positions, seed, stream)


def bits(noise):
    return noise.view(torch.int32).tolist()


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_noise_never_changes(key, expected):
    seed, position, stream = key
    assert bits(noise_of(6, [position], seed, stream)[0]) == expected


def test_noise_agrees_with_the_restatement():
    for seed, position, stream in [(0, 0, 0), (7, 12_345, 1), (2**64 - 1, 2**31, 5)]:
        got = noise_of(1000, [position], seed, stream)[0]
        expected = torch.from_numpy(gumbel(seed, position, stream, 1000))
        torch.testing.assert_close(got, expected)


def test_uniform_numbers_never_change_and_are_uniform():
    positions = [0, 9, 2**31, 2**33]
    got = uniform(positions, 2**64 - 3, streams.ACCEPT_STREAM)
    assert got.dtype == torch.float64
    assert got.tolist() == [float(uniforms(2**64 - 3, p, 3, 1)[0]) for p in positions]
    many = uniform(range(50_000), 5, streams.ACCEPT_STREAM)
    assert 0 < many.min() < many.max() < 1
    counts = torch.histc(many, 20, 0, 1)
    assert chi_squared(counts, torch.full((20,), 2500.0)) > 0.001
    # Not those of another stream, nor of the neighbouring position.
    other = uniform(range(50_000), 5, streams.RESIDUAL_STREAM)
    for pair in (other, many.roll(1)):
        assert abs(torch.corrcoef(torch.stack([many, pair]))[0, 1]) < 0.02


@pytest.mark.parametrize("n", [1, 5, 50])
def test_sampling_among_listed_tokens_is_sampling_with_the_rest_excluded(n):
    generator = torch.Generator().manual_seed(n)
    log_probs, ids = torch.randn(16, 60, generator=generator).topk(n, dim=-1)
    whole = torch.full((16, 60), -torch.inf).scatter(1, ids, log_probs)
    # Padding, which may name any token again.
    padded = torch.nn.functional.pad(log_probs, (0, 3), value=-torch.inf)
    padded_ids = torch.cat([ids, ids[:, :1].expand(-1, 3)], dim=-1)
    positions = list(range(100, 116))
    expected = sample(whole, positions, 4, streams.DRAFT_STREAM).tolist()
    for values, tokens in [(log_probs, ids), (padded, padded_ids), (whole, None)]:
        drawn = sample_among(values, tokens, positions, 4, streams.DRAFT_STREAM)
        assert drawn.tolist() == expected


SETTINGS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(1.3, top_k=7),
    SamplingParams(0.5, top_p=0.8, top_k=40),
    SamplingParams(1.1, min_p=0.05),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_row_alone_samples_as_in_a_batch(sampling, dtype):
    logits = (torch.randn(16, 300, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    together = choose(logits, sampling, 100, seed=5).tolist()
    alone = [choose(logits[i : i + 1], sampling, 100 + i, seed=5).item() for i in range(16)]
    assert together == alone
    order = list(reversed(range(16)))
    processed = process_logits(logits[order], sampling)
    if not sampling.greedy:
        assert sample(processed, [100 + i for i in order], 5).tolist() == together[::-1]


@pytest.mark.parametrize("native", [True, False])
def test_gathering_the_survivors_changes_nothing(native, monkeypatch):
    if not native:
        monkeypatch.setattr(streams, "sample_rows", lambda *_: None)
    processed = process_logits(torch.randn(16, 500), SamplingParams(0.9, top_k=9))
    noise = noise_of(500, range(16), 3)
    assert sample(processed, range(16), 3).tolist() == (processed + noise).argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.zeros(2, 300, dtype=dtype)
        logits[1, [40, 200, 299]] = 1.0
        assert choose(logits, SamplingParams(), 0, 0).tolist() == [0, 40]


DRAWS = 50_000
VOCABULARY = 8


def chi_squared(counts, wanted):
    """The p-value of counts where `wanted` were to be expected."""
    statistic = ((counts - wanted) ** 2 / wanted).sum().double()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def p_value(sampler, logits):
    """Of a chi-squared test of `DRAWS` tokens against softmax(logits)."""
    tokens = sampler(logits.expand(DRAWS, -1))
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    wanted = torch.softmax(logits.double(), -1) * DRAWS
    return chi_squared(counts, wanted)


def over_positions(rows, stream=0):
    return choose(rows, SamplingParams(1.0), 0, seed=17, stream=stream)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_samples_follow_the_distribution(scale):
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)) * scale
    assert p_value(over_positions, logits) > 0.001
    assert p_value(lambda rows: over_positions(rows, stream=1), logits) > 0.001


@pytest.mark.parametrize("distance", [0.1, 0.5, 1.5])
def test_drafter_and_target_agree_as_often_as_the_coupling_promises(distance):
    generator = torch.Generator().manual_seed(6)
    target = torch.randn(50, generator=generator)
    draft = target + distance * torch.randn(50, generator=generator)
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    tv = (p - q).abs().sum().item() / 2
    n = 20_000
    agree = over_positions(target.expand(n, -1)) == over_positions(draft.expand(n, -1))
    promised = (1 - tv) / (1 + tv)
    assert agree.double().mean().item() >= promised - 4 * math.sqrt(0.25 / n)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", SETTINGS)
def test_cuda_has_the_same_bits(sampling):
    on_cpu = noise_of(5000, range(64), 2**63 + 5, 1)
    on_gpu = noise_of(5000, range(64), 2**63 + 5, 1, "cuda").cpu()
    # The integers are equal; float64's logarithms may differ in the last place.
    assert (on_cpu != on_gpu).double().mean() < 1e-6
    logits = torch.randn(64, 5000, dtype=torch.float64)
    assert choose(logits, sampling, 7, 3).tolist() == choose(logits.cuda(), sampling, 7, 3).tolist()


BAD = [torch.nan, torch.inf]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=5),
    SamplingParams(1.0, top_p=0.5),
    SamplingParams(1.0, min_p=0.1),
    SamplingParams(0.8, presence_penalty=0.5),
    SamplingParams(logit_bias=((3, 2.0),)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rows_that_are_not_finite_have_no_token(sampling, dtype):
    torch.manual_seed(0)
    rows = torch.randn(9, 333).to(dtype)
    history = History([7, 8], 1)
    fine = choose(rows, sampling, 5, 1, history=history, draft_token_ids=[1] * 8)
    assert checked(fine.tolist()) == fine.tolist()
    for row, (at, value) in enumerate(itertools.product([0, 100, 332], BAD)):
        rows[row + 1, at] = value
    rows[7] = -torch.inf
    rows[8, 1:300] = -torch.inf  # as masks do
    chosen = choose(rows, sampling, 5, 1, history=history, draft_token_ids=[1] * 8)
    assert chosen.tolist()[1:8] == [NOT_FINITE] * 7
    assert chosen[0] == fine[0]
    assert chosen[8] == 0 or chosen[8] >= 300
    with pytest.raises(FloatingPointError, match="not finite"):
        checked(chosen.tolist())


@pytest.mark.parametrize("spec", [DistributionSpec(draw_from_it=True, top_k=k) for k in (0, 5)])
def test_distributions_that_are_not_finite_have_no_token(spec):
    torch.manual_seed(0)
    rows = torch.randn(5, 333)
    fine = round_off(rows, spec).draw(range(5), 1)
    rows[1, 7], rows[2, 0], rows[3] = torch.nan, torch.inf, -torch.inf
    drawn = round_off(rows, spec).draw(range(5), 1)
    assert drawn.tolist()[1:4] == [NOT_FINITE] * 3
    assert drawn[[0, 4]].tolist() == fine[[0, 4]].tolist()
