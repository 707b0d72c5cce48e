"""A step with a tree: each row is that of a chain, and a path that is kept can be built on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flyspec.draft_trees import paths
from flyspec.engine.captured.graphs import eagerly
from flyspec.engine.model import Model, Step
from flyspec.engine.runner import ModelRunner, Paging
from tests.engine.native_steps import SETS, native_model, needs_step, small_model
from tests.engine.random_models import loaded_model, make_model

LENGTH = 40
TREE = (0, 0, 1, 3, 3, 2, 6, 7, 0, 9, 8, 1)


def tokens(count: int, seed: int = 0, vocabulary: int = 41) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]


def random_tree(size: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(max(0, index - 9), index) for index in range(size))


def chains(model: Model, slot: int, prefix: list[int], step: Step) -> Tensor:
    """Return the rows [1 + drafts, vocab] of a tree, each computed as the end of a chain."""
    drafts = step.token_ids[step.num_chained :]
    texts = [prefix, *([*prefix, *(drafts[i] for i in path)] for path in paths(step.parents))]
    found = [model.forward([Step(slot, 0, text)])[0].logits.clone() for text in texts]
    return torch.cat(found)


def check_tree(
    model: Model, parents: tuple[int, ...], length: int, tolerance: float | None
) -> None:
    """Compare a tree's rows with chains, in company, and go on from each of its paths.

    Without a `tolerance`, all bits must be the same.
    """
    prefix, drafts = tokens(length), tokens(len(parents), 1)
    step = Step(0, length - 3, [*prefix[-3:], *drafts], 1 + len(drafts), parents=parents)
    other = Step(2, 0, tokens(7, 2), 3)
    expected = chains(model, 1, prefix, step)

    def same(got: Tensor, wanted: Tensor) -> None:
        if tolerance is None:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)

    leads = paths(parents)
    for path in ([], leads[len(leads) // 2], max(leads, key=len)):
        model.forward([Step(0, 0, prefix[:-3], 0)])
        beside, rows = (each.logits for each in model.forward([other, step]))
        same(rows, expected)
        same(beside, model.forward([other])[0].logits)
        assert model.cache.held(0) == prefix
        kept = [drafts[i] for i in path]
        model.cache.keep_path(0, length, path, kept)
        assert model.cache.held(0) == [*prefix, *kept]
        end = tokens(3, 3)
        going_on = Step(0, length + len(path), end, 3)
        whole = Step(1, 0, [*prefix, *kept, *end], 3)
        same(model.forward([going_on])[0].logits.clone(), model.forward([whole])[0].logits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("llama", "slots", {}),
        ("llama", "blocks", {}),
        ("mistral", "slots", {"sliding_window": 5}),
        ("gemma2", "blocks", {"sliding_window": 8}),
    ],
)
def test_rows_of_a_tree_are_those_of_chains(
    architecture: str, kind: str, changes: dict[str, Any]
) -> None:
    model = loaded_model(make_model(architecture, **changes))
    runner = ModelRunner(model, 3, paging=Paging(16) if kind == "blocks" else None)
    assert not runner.tree_refusal
    for parents in (TREE, (0, 1, 2, 3), (0, 0, 0)):
        check_tree(runner, parents, LENGTH, 1e-9)


@pytest.mark.usefixtures("one_thread")
def test_padded_steps_take_trees() -> None:
    check_tree(ModelRunner(loaded_model(make_model("llama")), 3, padded=True), TREE, LENGTH, 1e-9)


@needs_step
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("architecture", "length", "threads"),
    [("llama", 40, 1), ("qwen3", 63, 2), ("mistral", 64, 2), ("llama", 9, 2)],
)
def test_the_native_step_gives_a_tree_the_bits_of_chains(
    architecture: str, length: int, threads: int, name: str
) -> None:
    model = native_model(small_model(architecture), name, threads=threads)
    for seed in range(2):
        check_tree(model, random_tree(12 + 7 * seed, seed), length + seed, None)


@needs_step
def test_a_large_tree_beside_long_work() -> None:
    """More rows than the native step runs at once, and work for several threads."""
    module = small_model(
        "llama", hidden_size=512, intermediate_size=1024, vocab_size=3000, head_dim=64,
        max_position_embeddings=900, initializer_range=0.06,
    )  # fmt: skip
    model = native_model(module, SETS[0], context_length=900, threads=2)
    parents = random_tree(60, 3)
    prefix, drafts = tokens(230), tokens(60, 1)
    step = Step(0, 0, [*prefix, *drafts], 61, parents=parents)
    (_, rows) = model.forward([Step(2, 0, tokens(500, 4), 1), step])
    assert torch.equal(rows.logits.clone(), chains(model, 1, prefix, step))


@needs_step
def test_hidden_rows_of_a_tree() -> None:
    model = native_model(small_model("llama"), SETS[0])
    prefix, drafts = tokens(20), tokens(len(TREE), 1)
    step = Step(0, 0, [*prefix, *drafts], 1, (1, -1), 1 + len(TREE), TREE)
    (rows,) = model.forward([step])
    for index, path in enumerate(paths(TREE)):
        text = [*prefix, *(drafts[i] for i in path)]
        (own,) = model.forward([Step(1, 0, text, 1, (1, -1), 1)])
        for layer in range(2):
            assert torch.equal(rows.hidden[layer][1 + index], own.hidden[layer][0])


def test_models_that_take_no_trees_say_so() -> None:
    runner = ModelRunner(loaded_model(make_model("llama")), 2, paging=Paging(16, attention="sdpa"))
    runner.accelerate(eagerly, compiled=False)
    assert "--block-size 0" in runner.tree_refusal
    with pytest.raises(ValueError, match="parents: steps over blocks"):
        runner.forward([Step(0, 0, [1, 2, 3], 3, parents=(0, 0))])
