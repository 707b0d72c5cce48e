"""The runner on a GPU: its packed forward, padded or not, equals the model's own on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from flyspec.engine.loading import load_model
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner
from tests.gpu.devices import assert_near
from tests.tiny import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 400


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("target"), seed=3))


@pytest.fixture(scope="module")
def oracle(target):
    """Logits [n, vocab] of all of a sequence, recomputed from nothing: float64, on a CPU."""
    model = load_model(target, "cpu", "float64").model

    def logits(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids]), use_cache=False).logits[0]

    return logits


def sequences(rng, lengths):
    return [[rng.randrange(V) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("padded", [False, True, None])
def test_a_packed_forward_equals_each_sequence_alone(target, oracle, padded):
    """Prefill of several lengths, rounds of several K, a rollback, and slots out of order."""
    runner = ModelRunner(load_model(target, "cuda", "float64"), 8, padded)
    rng = random.Random(0)
    held = sequences(rng, [5, 90, 17, 130, 33])
    slots = [6, 0, 3, 1, 7]
    runner.forward([Step(slot, 0, ids, 0) for slot, ids in zip(slots, held, strict=True)])
    for turn in range(6):
        steps = []
        for index, slot in enumerate(slots):
            kept = rng.randint(1, len(held[index]))
            new = sequences(rng, [rng.choice([1, 1, 5, 17, 70 if turn == 3 else 9])])[0]
            held[index] = [*held[index][:kept], *new]
            steps.append(Step(slot, kept, new, rng.randint(1, len(new))))
        rows = [rows.logits for rows in runner.forward(steps)]
        for step, ids, got in zip(steps, held, rows, strict=True):
            assert got.device.type == "cuda"
            expected = oracle(ids)[-step.num_logits :]
            assert_near(got, expected, torch.float64)


def test_prefixes_are_found_and_copied(target, oracle):
    runner = ModelRunner(load_model(target, "cuda", "float64"), 3)
    (shared,) = sequences(random.Random(1), [60])
    first = runner.cache.acquire(shared)
    runner.forward([Step(first.slot, 0, shared, 0)])
    other = [*shared[:40], *sequences(random.Random(2), [9])[0]]
    second = runner.cache.acquire(other)
    assert (first.length, second.length) == (0, 40)
    ((got, _),) = runner.forward([Step(second.slot, 40, other[40:], 9)])
    assert_near(got, oracle(other)[40:], torch.float64)
    # What was copied from is as it was.
    ((got, _),) = runner.forward([Step(first.slot, 59, shared[59:], 1)])
    assert_near(got, oracle(shared)[-1:], torch.float64)


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_stays_near(target, oracle, padded):
    runner = ModelRunner(load_model(target, "cuda", "bfloat16"), 4, padded)
    held = sequences(random.Random(3), [12, 80, 31])
    rows = runner.forward([Step(i, 0, ids, 4) for i, ids in enumerate(held)])
    for ids, (got, _) in zip(held, rows, strict=True):
        expected = oracle(ids)[-4:]
        assert got.dtype == torch.bfloat16
        difference = (got.cpu().double() - expected).abs().max() / expected.abs().max()
        assert difference < 0.05


def test_the_model_is_tried_out_before_it_serves(target):
    for dtype in ("float64", "float32", "bfloat16"):
        runner = ModelRunner(load_model(target, "cuda", dtype), 2)
        runner.warm_up()
        assert runner.cache.num_free == 2
