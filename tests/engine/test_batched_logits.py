"""Rows of many sequences in one pass, against each sequence's own way through a CPU."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.engine.batched_logits import RowSampling, draw_rows, truncates, warp_rows
from flyspec.engine.logits import logprob_table, logprobs_in, process_logits, token_logprobs
from flyspec.engine.sampling import NOT_FINITE, SECOND_STREAM, choose_processed, row_keys
from flyspec.values.tokens import SamplingParams
from tests.examples import examples

CPU = torch.device("cpu")
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 11, 12, 99]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.7, 1.0]),
)
LOGIT = st.sampled_from([-math.inf, -90.0, -2.5, 0.0, 0.0, 0.1, 1.5, 3.0, 3.0, 8.0])
ROW = st.lists(LOGIT, min_size=12, max_size=12).filter(lambda row: max(row) > -math.inf)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@given(st.lists(st.tuples(ROW, SAMPLINGS), min_size=1, max_size=9), DTYPES)
@settings(max_examples=examples(150))
def test_rows_are_warped_as_transformers_warps_each(rows, dtype) -> None:
    """Ties at every edge are decided alike."""
    logits = torch.tensor([row for row, _ in rows], dtype=dtype)
    before = logits.clone()
    samplings = [sampling for _, sampling in rows]
    got = warp_rows(logits, RowSampling.of(samplings, CPU), any(map(truncates, samplings)))
    assert torch.equal(logits, before)
    for i, sampling in enumerate(samplings):
        expected = process_logits(logits[i : i + 1], sampling)[0]
        assert torch.equal(got[i], expected.to(got.dtype)), sampling


@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(SAMPLINGS, st.integers(0, 2**64 - 1), st.integers(0, 10**6)),
        min_size=1, max_size=9,
    ),
    st.sampled_from([None, torch.nan, torch.inf]),
)  # fmt: skip
@settings(max_examples=examples(80))
def test_rows_are_drawn_as_each_is_alone(number, rows, bad) -> None:
    logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(number)) * 2
    if bad is not None:
        logits[number % len(rows), number % 40] = bad
    samplings, seeds, positions = zip(*rows, strict=True)
    parameters = RowSampling.of(samplings, CPU)
    processed = warp_rows(logits, parameters, any(map(truncates, samplings)))
    keys = torch.tensor(row_keys(seeds, positions, SECOND_STREAM))
    got = draw_rows(processed, keys, parameters.greedy).tolist()
    for i, (sampling, seed, position) in enumerate(rows):
        row = process_logits(logits[i : i + 1], sampling)
        assert got[i] == int(choose_processed(row, sampling, [position], seed, SECOND_STREAM))
    assert (NOT_FINITE in got) == (bad is not None)


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    st.integers(0, 2**40),
    st.integers(0, 4),
)
@settings(max_examples=examples(50))
def test_joined_rows_have_each_sessions_keys(seeds, position, stream) -> None:
    positions = [position + i for i in range(len(seeds))]
    alone = [row_keys(seed, [at], stream)[0] for seed, at in zip(seeds, positions, strict=True)]
    assert row_keys(seeds, positions, stream) == alone


@given(st.lists(ROW, min_size=1, max_size=5), st.integers(0, 14), DTYPES, st.data())
@settings(max_examples=examples(50))
def test_tables_of_logprobs_tell_the_same(values, top, dtype, data) -> None:
    logits = torch.tensor(values, dtype=dtype)
    tokens = [[data.draw(st.integers(0, 11)) for _ in range(3)] for _ in values]
    table = logprob_table(logits, torch.tensor(tokens), top).tolist()
    for which in range(3):
        alone = token_logprobs(logits, [row[which] for row in tokens], top)
        assert [logprobs_in(row, which, 3, top) for row in table] == alone
    fewer = token_logprobs(logits, [row[0] for row in tokens], top // 2)
    assert [logprobs_in(row, 0, 3, top // 2) for row in table] == fewer
