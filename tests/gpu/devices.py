"""The device of these tests: CUDA, or what FLYSPEC_TEST_DEVICE names.

On `cpu` they run as they are, but for graphs and what is counted of CUDA, which tries them out.
"""

import copy
import os
from functools import lru_cache

import pytest
import torch

from flyspec.engine.captured.graphs import CudaCapture
from flyspec.engine.captured.steps import CapturedSteps
from flyspec.engine.runner import ModelRunner, Paging
from tests.engine.random_models import eagerly, loaded_model, make_model

DEVICE = torch.device(os.environ.get("FLYSPEC_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),  # compiling takes minutes, at most
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, LENGTH, BLOCK = 400, 640, 32
"""BLOCK is what services use on a GPU."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.12,
}
"""Heads of a size that all attention over blocks has kernels for, four to a KV head as in Llama."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Maximum difference as a share of the largest logit. Norms are in float32 whatever the type."""


def capture():
    """A new capture of graphs; on a CPU, of the same programs run as they are."""
    return CudaCapture() if ON_CUDA else eagerly


@lru_cache(maxsize=4)
def oracle(dtype):
    """The model of `runner_of` with its weights, in float64 on the CPU, by transformers alone."""
    model = copy.deepcopy(random_weights(dtype)).to(torch.float64)
    model.set_attn_implementation("sdpa")
    return model


@lru_cache(maxsize=4)
def random_weights(dtype):
    return make_model("llama", dtype=dtype, **SIZES)


@torch.inference_mode()
def expected_logits(dtype, token_ids):
    """[tokens, vocab] of a whole sequence, recomputed from nothing."""
    return oracle(dtype)(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def runner_of(dtype, attention, way="exact", num_slots=33, num_blocks=128):
    """A runner over blocks: exact, fixed (captured as nothing), graphs, or graphs and compiled.

    Over slots if that is the `attention`.
    """
    if attention == "flashinfer":
        if not ON_CUDA:
            pytest.skip("FlashInfer runs on NVIDIA GPUs")
        pytest.importorskip("flashinfer", exc_type=ImportError)
    model = copy.deepcopy(random_weights(dtype)).to(DEVICE)
    if attention == "slots":
        return ModelRunner(loaded_model(model, LENGTH), num_slots)
    paging = Paging(BLOCK, num_blocks, attention)
    runner = ModelRunner(loaded_model(model, LENGTH), num_slots, paging=paging)
    if way != "exact" and isinstance(runner._steps, CapturedSteps):
        runner.accelerate(eagerly if way == "fixed" else capture(), compiled=way == "compiled")
        assert runner._steps._graphs.fixed, "a step could not be captured"
        runner.cache.forget()
    return runner


def assert_near(got, expected, dtype):
    """Raises `AssertionError`, with the difference as a share of the largest logit."""
    assert got.device.type == DEVICE.type
    difference = float((got.cpu().double() - expected.cpu().double()).abs().max())
    share = difference / float(expected.abs().max())
    assert share < TOLERANCE[dtype], f"{share:.2g} of the largest logit"
