"""What is compiled on a GPU, compiled for a CPU: decoder layers, and attention over blocks."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch._dynamo.utils import counters

from flyspec.engine.attention.flex import FlexAttention
from flyspec.engine.batched_logits import draw_rows, fused_draw
from flyspec.engine.captured.graphs import eagerly
from flyspec.engine.captured.steps import CapturedSteps
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.engine.sampling import row_keys, token_steps
from tests.engine.random_models import VOCABULARY, loaded_model, make_model, reference_logits

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

TOLERANCE = 1e-4


def steps_of(rng: random.Random, lengths: list[int]) -> list[Step]:
    return [
        Step(slot, 0, [rng.randrange(VOCABULARY) for _ in range(length)], length)
        for slot, length in enumerate(lengths)
    ]


def check(runner: ModelRunner, reference: torch.nn.Module, steps: list[Step]) -> None:
    for step, rows in zip(steps, runner.forward(steps), strict=True):
        expected = reference_logits(reference, step.token_ids)
        torch.testing.assert_close(rows.logits, expected, rtol=0, atol=TOLERANCE)


def test_compiled_attention_reads_the_listed_blocks_alone() -> None:
    """Which blocks are whose is in FlexAttention's lists only once it is compiled."""
    model = make_model("mistral", dtype=torch.float32, sliding_window=21, head_dim=16)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    runner = ModelRunner(loaded_model(model), 4, paging=Paging(32, attention="flex"))
    attention = FlexAttention(runner.cache, compiled=True)
    runner._steps = CapturedSteps(runner.model, runner.cache, attention)
    rng = random.Random(0)
    counters.clear()
    check(runner, reference, steps_of(rng, [9, 14, 30]))
    check(runner, reference, steps_of(rng, [20, 33, 12]))
    check(runner, reference, steps_of(rng, [25, 18, 26, 31]))
    # One shape, whatever the lengths and the blocks: nothing is compiled again.
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_draws_have_the_same_bits() -> None:
    for rows in (1, 6):
        logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(rows))
        keys = torch.tensor(row_keys(2**53 - 1, range(100, 100 + rows)))
        greedy = torch.arange(rows) % 3 == 2
        found = fused_draw()(logits, keys, greedy, token_steps(500, keys.device))
        assert torch.equal(found, draw_rows(logits, keys, greedy))


def test_compiled_layers_give_the_same_logits_in_every_shape() -> None:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    runner = ModelRunner(loaded_model(model), 4, paging=Paging(32, attention="sdpa"))
    runner.accelerate(eagerly, compiled=True)
    rng = random.Random(0)
    for lengths in ([1, 1, 1], [16, 9], [130], [3, 2, 4, 1]):
        check(runner, reference, steps_of(rng, lengths))
    assert not counters["recompile_limit"]
