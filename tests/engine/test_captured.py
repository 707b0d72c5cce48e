"""Steps of fixed shape, run eagerly: equal to transformers, and nothing waits for the host."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from flyspec.engine.captured.graphs import Replay, eagerly
from flyspec.engine.captured.program import Program
from flyspec.engine.captured.shapes import (
    MAX_TOKENS,
    captured_shape,
    continuations,
    exact_shapes,
)
from flyspec.engine.captured.steps import MAX_DRAWN, CapturedSteps
from flyspec.engine.model import Draw, History, Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.engine.random_models import (
    VOCABULARY,
    loaded_model,
    make_model,
)

pytestmark = pytest.mark.usefixtures("one_thread", "uncompiled")

KINDS: dict[str, dict[str, Any]] = {
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
def models(kind: str) -> tuple[Any, Any]:
    """A random model and its copy with transformers' own attention."""
    model = make_model(kind, **KINDS[kind])
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")
    return model, reference


def runner_of(kind: str, paging: Paging | None, num_slots: int = 6) -> ModelRunner:
    return ModelRunner(loaded_model(models(kind)[0]), num_slots, paging=paging)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_draws_equal_those_of_single_steps(attention: Any) -> None:
    """Batches of mixed parameters, drawn by programs, against one forward and read per token."""
    plain = runner_of("llama", Paging(SIZE))
    paged = runner_of("llama", Paging(SIZE, attention=attention))
    paged.accelerate(eagerly, compiled=False)
    assert isinstance(paged._steps, CapturedSteps)
    rng = random.Random(attention)
    for _ in range(4):
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


def random_draw(rng: random.Random, step: Step) -> Draw:
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


class NoHost(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or depend on what it computed."""

    supports_higher_order_operators = True
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # FlexAttention's own
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"{name} waits for the device"
        if name == "index":  # by a mask: the same as nonzero
            assert all(i is None or i.dtype is not torch.bool for i in args[1]), "a boolean index"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "attention"), [("mistral", "flex"), ("gemma2", "sdpa")])
def test_a_program_reads_nothing(kind: str, attention: Any) -> None:
    programs: set[Program] = set()

    def watched(run: Any) -> Replay:
        def refusing() -> None:
            with NoHost():
                run()
            programs.add(run.__self__)

        return refusing

    runner = runner_of(kind, Paging(SIZE, attention=attention))
    runner.accelerate(watched, compiled=False)
    programs.clear()
    rng = random.Random(3)
    slots = [runner.cache.acquire(text(rng, 14)).slot for _ in range(3)]
    for sampling in SAMPLINGS * 2:
        steps = [Step(slot, 0, text(rng, 14)) for slot in slots]
        runner.draw([Draw(step, sampling, max_tokens=8, min_confidence=1e-9) for step in steps])
        runner.forward(steps)
    assert {type(program).__name__ for program in programs} == {"FirstStep", "SingleSteps"}
    # A forward, and for each way of drawing the first step and 4 + 2 + 1 more.
    assert len(programs) == 1 + 3 * 4


def sizes_to_try() -> Iterator[list[int]]:
    rng = random.Random(5)
    for _ in range(100):
        yield [rng.choice([1, 1, 2, 5, 16, 33, 70, 200]) for _ in range(rng.randint(1, 40))]


@pytest.mark.parametrize("ragged", [False, True])
def test_shapes_hold_what_is_asked(ragged: bool) -> None:
    for lengths in sizes_to_try():
        shape = captured_shape(lengths, ragged)
        if shape is not None:
            assert shape.sequences >= len(lengths)
            assert shape.tokens <= MAX_TOKENS
            check_rows(shape.first_rows(lengths), lengths, shape.tokens)
        elif not ragged:
            assert max(lengths) * len(lengths) * 4 > MAX_TOKENS
        groups = exact_shapes(lengths, ragged)
        assert sorted(i for indices, _ in groups for i in indices) == [*range(len(lengths))]
        for indices, exact in groups:
            own = [lengths[i] for i in indices]
            check_rows(exact.first_rows(own), own, exact.tokens)


def check_rows(first: Sequence[int], lengths: Sequence[int], tokens: int) -> None:
    rows = [row + i for row, length in zip(first, lengths, strict=True) for i in range(length)]
    assert len(set(rows)) == len(rows)
    assert max(rows) < tokens


def test_continuations_add_up() -> None:
    for count in range(MAX_DRAWN):
        parts = continuations(count)
        assert sum(parts) == count
        assert len(set(parts)) == len(parts)
