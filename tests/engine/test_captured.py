"""Steps of fixed shape, run eagerly: equal to transformers, and nothing waits for the host."""

import copy
import random
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch

from flyspec.engine.attention import choice
from flyspec.engine.attention.flashinfer import FlashInferAttention, unavailable
from flyspec.engine.captured.steps import MAX_DRAWN, CapturedSteps
from flyspec.engine.model import Draw, History, Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.errors import ConfigError
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.engine.random_models import (
    VOCABULARY,
    eagerly,
    float64_throughout,
    loaded_model,
    make_model,
    reference_logits,
)

pytestmark = pytest.mark.usefixtures("one_thread", "uncompiled")

KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 21},
    "gemma2": {
        "head_dim": 6,
        "sliding_window": 8,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 3.0,
    },
}
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.6, min_p=0.05),
]
SIZE = 16


@lru_cache(maxsize=8)
def models(kind):
    """A random model and its copy with transformers' own attention."""
    model = make_model(kind, **KINDS[kind])
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")
    return model, reference


def runner_of(kind, paging, num_slots=6):
    return ModelRunner(loaded_model(models(kind)[0]), num_slots, paging=paging)


def text(rng, length):
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_draws_equal_those_of_single_steps(attention):
    """Batches of mixed parameters, drawn by programs, against one forward and read per token."""
    plain = runner_of("llama", Paging(SIZE))
    paged = runner_of("llama", Paging(SIZE, attention=attention))
    paged.accelerate(eagerly, compiled=False)
    assert isinstance(paged._steps, CapturedSteps)
    rng = random.Random(attention)
    for _ in range(2):
        draws = []
        for runner in (plain, paged):
            runner.cache._free.sort()
            runner.cache.reuse = False
        for index in range(rng.choice([1, 3, 4])):
            ids = text(rng, rng.choice([3, 17, 40, 80]))
            for runner in (plain, paged):
                runner.cache.reuse = False
                assert runner.cache.acquire(ids) == (index, 0)
            draws.append(random_draw(rng, Step(index, 0, ids)))
        expected, found = plain.draw(draws), paged.draw(draws)
        for draw, one, other in zip(draws, expected, found, strict=True):
            assert other.token_ids == one.token_ids
            assert [*other.origins] == [*one.origins]
            assert [*other.distributions] == [*one.distributions]
            assert other.confidences == pytest.approx(one.confidences, abs=1e-9)
            held = [runner.cache.held(draw.step.slot) for runner in (plain, paged)]
            assert held[0] == held[1]
            for runner in (plain, paged):
                runner.cache.release(draw.step.slot)


def random_draw(rng, step):
    sampling = rng.choice([None, *SAMPLINGS, SamplingParams(presence_penalty=1.0)])
    history = None
    if sampling is not None and sampling.needs_history:
        history = History(step.token_ids, 1)
    several = rng.random() < 0.3
    return Draw(
        step._replace(num_logits=rng.randint(1, len(step.token_ids)) if several else 1),
        sampling,
        seed=rng.randrange(2**53),
        history=history,
        distribution=rng.choice([None, DistributionSpec(0, True)]),
        max_tokens=1 if several else rng.choice([1, 2, 6, 15, MAX_DRAWN]),
        stop_token_ids=rng.choice([(), (7, 9)]),
        min_confidence=rng.choice([0.0, 1e-3]),
        confidences=rng.random() < 0.5,
    )


# --- FlashInfer, against its documented interface: the library itself needs a GPU ------------


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` in its CUDA graph mode, NHD layout."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        backend="auto",
    ):
        assert backend in ("auto", "fa2")
        self._captured = use_cuda_graph
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self._buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf
        self._indices = paged_kv_indices_buf
        self._rows = None

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
    ):
        given = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        if not self._captured:  # buffers as they come, of any size
            self._buffers = tuple(values.clone() for values in given)
            self._indices, self._rows = paged_kv_indices.clone(), None
        for buffer, values in zip(self._buffers, given, strict=True):
            assert values.dtype == torch.int32
            assert values.device.type == "cpu", "planned on the host"
            buffer.copy_(values)  # of the same length: the batch size is fixed
            assert len(buffer) == len(values)
        assert len(paged_kv_indices) <= len(self._indices)
        self._indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        rows = int(qo_indptr[-1])
        assert self._rows is None or rows <= self._rows
        self._rows = self._rows or rows
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size, self._causal, self._scale = page_size, causal, sm_scale
        self._window, self._cap, self._dtype = window_left, logits_soft_cap, q_data_type

    def run(self, q, paged_kv_cache):
        queries, pages, last = (buffer.tolist() for buffer in self._buffers)
        heads, kv_heads, dim = self._heads
        assert q.shape == (queries[-1], heads, dim)
        assert q.dtype == self._dtype
        assert self._causal
        assert [states.shape[1:] for states in paged_kv_cache] == [
            (self._page_size, kv_heads, dim)
        ] * 2
        out = torch.zeros_like(q)
        for i in range(len(queries) - 1):
            blocks = self._indices[pages[i] : pages[i + 1]].long()
            length = max(0, len(blocks) - 1) * self._page_size + last[i]
            keys, values = (states[blocks].flatten(0, 1)[:length] for states in paged_kv_cache)
            own = q[queries[i] : queries[i + 1]]
            positions = torch.arange(length - len(own), length)[:, None]
            seen = torch.arange(length) <= positions
            if self._window >= 0:
                seen &= torch.arange(length) >= positions - self._window
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = own[:, head] @ keys[:, group].T * self._scale
                if self._cap:
                    scores = self._cap * (scores / self._cap).tanh()
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
                out[queries[i] : queries[i + 1], head] = weights @ values[:, group]
        return out


@pytest.fixture
def library(monkeypatch):
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", module)
    monkeypatch.setattr(choice.flashinfer, "unavailable", lambda *args: None)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("fixed", [False, True], ids=["exact", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_steps_equal_each_sequence_alone(kind, fixed):
    runner = ModelRunner(loaded_model(models(kind)[0]), 5, paging=Paging(SIZE, 0, "flashinfer"))
    if fixed:
        runner.accelerate(eagerly, compiled=False)
    assert isinstance(runner._steps.attention, FlashInferAttention)
    rng = random.Random(kind)
    held = [[] for _ in range(5)]
    slots = [runner.cache.acquire().slot for _ in range(5)]
    with float64_throughout():
        for _ in range(4):
            steps = []
            order = rng.sample(range(5), rng.choice([1, 3, 5]))
            for index in order:
                kept = rng.randint(0, len(held[index]))
                new = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 9, 17, 40]))]
                held[index] = [*held[index][:kept], *new][:158]
                new = held[index][kept:]
                steps.append(Step(slots[index], kept, new, rng.randint(0, len(new))))
            for step, index, (logits, _) in zip(steps, order, runner.forward(steps), strict=True):
                expected = reference_logits(models(kind)[1], held[index])
                expected = expected[len(expected) - step.num_logits :]
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("library")
def test_draws_plan_their_first_step_alone():
    found = []
    for attention in ("auto", "flashinfer"):
        paging = Paging(SIZE, attention=attention)
        runner = ModelRunner(loaded_model(models("llama")[0]), 3, paging=paging)
        if attention == "flashinfer":
            runner.accelerate(eagerly, compiled=False)
        rng = random.Random(2)
        for _ in range(3):
            prompts = [[rng.randrange(VOCABULARY) for _ in range(9)] for _ in range(3)]
            draws = [
                Draw(Step(runner.cache.acquire().slot, 0, ids), SamplingParams(), max_tokens=12)
                for ids in prompts
            ]
            found.append([drafted.token_ids for drafted in runner.draw(draws)])
            for draw in draws:
                runner.cache.release(draw.step.slot)
    assert found[:3] == found[3:]


@pytest.mark.usefixtures("library")
def test_where_it_cannot_run_the_reason_is_given(monkeypatch):
    cuda = torch.device("cuda")
    assert "NVIDIA" in str(unavailable(torch.device("cpu"), torch.bfloat16, 128))
    assert "no kernels" in str(unavailable(cuda, torch.float64, 128))
    assert "no kernels" in str(unavailable(cuda, torch.bfloat16, 80))
    assert unavailable(cuda, torch.bfloat16, 128) is None
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    assert "pip install flashinfer-python" in str(unavailable(cuda, torch.bfloat16, 128))


@pytest.mark.usefixtures("library")
def test_asked_for_where_it_cannot_run_it_is_refused(monkeypatch):
    monkeypatch.setattr(choice.flashinfer, "unavailable", unavailable)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: .*; use auto"):
        ModelRunner(loaded_model(make_model("llama")), 2, paging=Paging(16, 0, "flashinfer"))
