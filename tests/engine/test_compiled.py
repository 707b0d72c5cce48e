"""Code that is compiled on a GPU, compiled for a CPU: decoder layers, attention over blocks.

And nothing where there is no compiler.
"""

import copy
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from flyspec.config import VerifySettings
from flyspec.engine import batched_logits, compiling
from flyspec.engine.attention import flashinfer
from flyspec.engine.attention.choice import choose_attention
from flyspec.engine.attention.flashinfer import FlashInferAttention
from flyspec.engine.attention.flex import FlexAttention
from flyspec.engine.attention.paged import GatheredAttention
from flyspec.engine.batched_logits import draw_rows
from flyspec.engine.captured.steps import CapturedSteps
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.engine.sampling import row_keys, token_steps
from flyspec.errors import ConfigError
from tests.engine.random_models import (
    VOCABULARY,
    eagerly,
    loaded_model,
    make_model,
    reference_logits,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

TOLERANCE = 1e-4


def steps_of(rng, lengths):
    return [
        Step(slot, 0, [rng.randrange(VOCABULARY) for _ in range(length)], length)
        for slot, length in enumerate(lengths)
    ]


def check(runner, reference, steps):
    for step, rows in zip(steps, runner.forward(steps), strict=True):
        expected = reference_logits(reference, step.token_ids)
        torch.testing.assert_close(rows.logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.full
def test_compiled_attention_reads_the_listed_blocks_alone():
    """FlexAttention's lists say which blocks are whose only once it is compiled."""
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


@pytest.mark.full
def test_compiled_draws_have_the_same_bits():
    for rows in (1, 6):
        logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(rows))
        keys = torch.tensor(row_keys(2**53 - 1, range(100, 100 + rows)))
        greedy = torch.arange(rows) % 3 == 2
        draw = compiling.compiled(batched_logits._draw, dynamic=True)
        found = draw(logits, keys, greedy, token_steps(500, keys.device))
        assert torch.equal(found, draw_rows(logits, keys, greedy))


@pytest.mark.full
def test_compiled_layers_give_the_same_logits_in_every_shape():
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    runner = ModelRunner(loaded_model(model), 4, paging=Paging(32, attention="sdpa"))
    runner.accelerate(eagerly, compiled=True)
    rng = random.Random(0)
    for lengths in ([1, 1, 1], [16, 9], [130], [3, 2, 4, 1]):
        check(runner, reference, steps_of(rng, lengths))
    assert not counters["recompile_limit"]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")


class GpuRunner(ModelRunner):
    """A runner that believes its model is on a GPU."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._device = torch.device("cuda")


@pytest.fixture(params=["no compiler", "no headers", "--enforce-eager"])
def uncompilable(request, monkeypatch, tmp_path):
    """Settings under which nothing can be compiled, or may be."""
    match request.param:
        case "no compiler":
            monkeypatch.setenv("PATH", str(tmp_path))
            monkeypatch.delenv("CC", raising=False)
        case "no headers":
            monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("something was compiled"))
    eager = request.param == "--enforce-eager"
    settings = VerifySettings(model="m", max_sessions=2, enforce_eager=eager)
    compiling.settle(settings.enforce_eager)
    compiling.compiled.cache_clear()
    yield settings
    compiling.settle(False)
    compiling.compiled.cache_clear()


@pytest.mark.parametrize("installed", [True, False], ids=["flashinfer", "no flashinfer"])
def test_where_nothing_can_be_compiled_a_gpu_attends_on_copies(
    uncompilable, installed, monkeypatch
):
    model = make_model("llama", dtype=torch.bfloat16, head_dim=64)
    cache = ModelRunner(loaded_model(model), 2, paging=Paging(32)).cache
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=model.config)
    if installed:
        monkeypatch.setattr(flashinfer, "unavailable", lambda *_: None)
        monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 0)
        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
        attention = FlashInferAttention(cache, torch.device("meta"))._singles
    else:
        attention = choose_attention("auto", cache, there)
    assert isinstance(attention, GatheredAttention)
    with pytest.raises(ConfigError, match=r"--attention-backend flex: .*(gcc|--enforce-eager)"):
        choose_attention("flex", cache, there)


def test_where_nothing_can_be_compiled_draws_are_the_same(uncompilable):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    keys, greedy = torch.tensor(row_keys(7, range(3))), torch.tensor([False, True, False])
    on_gpu = logits.as_subclass(OnGpu)
    assert torch.equal(draw_rows(on_gpu, keys, greedy), draw_rows(logits, keys, greedy))


def test_where_nothing_can_be_compiled_layers_are_not(uncompilable):
    runner = GpuRunner.planned(loaded_model(make_model("llama")), uncompilable)
    assert not runner._compiles
    assert (runner._capture is None) == uncompilable.enforce_eager
    assert "compiled" not in runner._numerics()


def test_where_there_is_a_compiler_layers_are_compiled():
    settings = VerifySettings(model="m", max_sessions=2)
    runner = GpuRunner.planned(loaded_model(make_model("llama")), settings)
    assert runner._compiles
