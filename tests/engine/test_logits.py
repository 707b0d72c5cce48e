"""Raw logits become processed ones: against transformers, the formulas, and row by row."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as hf

from flyspec.engine.batched_logits import RowSampling, draw_rows, truncates, warp_rows
from flyspec.engine.logits import History, process_logits, token_logprobs
from flyspec.engine.sampling import NOT_FINITE, SECOND_STREAM, choose_processed, row_keys
from flyspec.errors import InvalidArgumentError
from flyspec.values.tokens import SamplingParams
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")

V = 48
EOS = (3, 7)


def rows_of(seed, rows, dtype=torch.float32):
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def test_half_precision_is_computed_in_float32_and_float64_stays():
    history = History([1, 2, 3], 1, EOS)
    for sampling in (
        SamplingParams(1.0),
        SamplingParams(0.7, 0.9, min_p=0.1),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(min_tokens=9),
    ):
        for dtype, wanted in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
            logits = rows_of(0, 1, dtype)
            before = logits.clone()
            assert process_logits(logits, sampling, history).dtype == wanted
            assert torch.equal(logits, before)


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8, 10.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0, 2.0]),
    logit_bias=st.dictionaries(
        st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=4
    ).map(lambda bias: tuple(sorted(bias.items()))),
    min_tokens=st.integers(0, 12),
)
TOKENS = st.lists(st.integers(0, V - 1) | st.sampled_from(EOS), max_size=10)


def row_restated(row, sampling, tokens, prompt):
    """One row: transformers' processors one by one; OpenAI's formula in plain Python."""
    scores, ids = row[None].clone(), torch.tensor([tokens])
    if sampling.logit_bias:
        bias = {(token,): float(value) for token, value in sampling.logit_bias}
        scores = scores + hf.SequenceBiasLogitsProcessor(bias)(ids, torch.zeros_like(scores))
    if sampling.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    output = tokens[prompt:]
    values = scores[0].tolist()
    for token in range(V):
        count = output.count(token)
        values[token] = (
            values[token]
            - count * sampling.frequency_penalty
            - float(count > 0) * sampling.presence_penalty
        )
    scores = torch.tensor([values], dtype=row.dtype)
    if sampling.min_tokens:
        held_back = hf.MinNewTokensLengthLogitsProcessor(prompt, sampling.min_tokens, list(EOS))
        scores = held_back(ids, scores)
    if sampling.temperature == 0:
        return scores[0]
    scores = hf.TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = hf.TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = hf.TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = hf.MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0]


@given(SAMPLING, st.integers(0, 10**6), TOKENS.filter(len), TOKENS, st.data())
@settings(max_examples=examples(50))
def test_rows_agree_with_transformers_and_openai(sampling, seed, before, drafts, data):
    prompt = data.draw(st.integers(0, len(before)))
    logits = rows_of(seed, len(drafts) + 1, torch.float64)
    got = process_logits(logits, sampling, History(before, prompt, EOS), drafts)
    for i, row in enumerate(got):
        expected = row_restated(logits[i], sampling, before + drafts[:i], prompt)
        torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(row == -torch.inf, expected == -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 100.0])
def test_parameters_at_the_ends_of_their_ranges_leave_finite_logits(temperature, dtype):
    """Others are taken for a failure of the model."""
    logits = rows_of(2, 3, dtype)
    for penalty in (5e-324, 1e-38, 1e-20, 10.0):
        for tiny, bias in ((5e-324, 100.0), (1.0, -100.0)):
            sampling = SamplingParams(
                temperature, top_p=tiny, min_p=tiny, repetition_penalty=penalty,
                presence_penalty=2.0, frequency_penalty=-2.0, logit_bias=((5, bias),),
            )  # fmt: skip
            got = process_logits(logits, sampling, History([1, 5, 9], 1, EOS), [9, 7])
            assert got.amax(dim=-1).isfinite().all(), sampling


def test_what_is_missing_is_an_error():
    logits = rows_of(0, 3)
    for sampling in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(min_tokens=1),
    ):
        with pytest.raises(ValueError, match="history is needed"):
            process_logits(logits, sampling)
    with pytest.raises(ValueError, match="3 rows need 2 drafted tokens"):
        process_logits(logits, SamplingParams(presence_penalty=1.0), History([1], 1), [4])
    with pytest.raises(InvalidArgumentError, match=r"logit_bias\[48\].*vocabulary size 48"):
        process_logits(logits, SamplingParams(logit_bias=((2, 1.0), (V, 1.0))))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, tie_word_embeddings=False, eos_token_id=list(EOS),
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def test_generate_has_the_same_order(model):
    """All at once, sampled: transformers' own list of processors on every row."""
    from transformers import GenerationConfig

    sampling = SamplingParams(0.8, 0.9, 20, 0.03, repetition_penalty=1.4, min_tokens=8,
                              logit_bias=((4, 2.0), (7, 5.0)))  # fmt: skip
    config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.9, top_k=20, min_p=0.03, repetition_penalty=1.4,
        min_new_tokens=8, sequence_bias={(4,): 2.0, (7,): 5.0}, eos_token_id=list(EOS),
    )  # fmt: skip
    config._eos_token_tensor = torch.tensor(EOS)
    before, drafts = [4, 5, 6, 20], [5, 30, 30, 7, 31, 5, 2, 1]
    processors = model._get_logits_processor(config, input_ids_seq_length=2, device="cpu")
    logits = rows_of(3, 9, torch.float64)
    got = process_logits(logits, sampling, History(before, 2, EOS), drafts)
    for i, row in enumerate(got):
        ids = torch.tensor([before + drafts[:i]])
        torch.testing.assert_close(row, processors(ids, logits[i : i + 1])[0], rtol=0, atol=1e-12)


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -2.5, 0.0, 0.0, 1.5, 3.0, 3.0, 40.0]),
                 min_size=9, max_size=9).filter(lambda row: max(row) > -math.inf),
        min_size=1, max_size=5,
    ),
    st.integers(0, 12),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.data(),
)  # fmt: skip
@settings(max_examples=examples(25))
def test_logprobs_restated(values, top, dtype, data):
    token_ids = [data.draw(st.integers(0, 8)) for _ in values]
    found = token_logprobs(torch.tensor(values, dtype=dtype), token_ids, top)
    assert len(found) == len(values)
    for row, token, got in zip(values, token_ids, found, strict=True):
        total = math.log(sum(math.exp(value) for value in row))
        best = sorted(range(9), key=lambda i: (-row[i], i))[:top]
        assert got.logprob == pytest.approx(row[token] - total, abs=1e-5)
        assert got.top_token_ids == tuple(best)
        assert got.top_logprobs == pytest.approx([row[i] - total for i in best], abs=1e-5)


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
@settings(max_examples=examples(40))
def test_rows_are_warped_as_transformers_warps_each(rows, dtype):
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
@settings(max_examples=examples(40))
def test_rows_are_drawn_as_each_is_alone(number, rows, bad):
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
