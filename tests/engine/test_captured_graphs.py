"""Replays of recorded operations equal eager steps, and no step needs to read its device."""

import copy
import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.values.tokens import SamplingParams
from tests.engine.random_models import VOCABULARY, eagerly, loaded_model, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

PAGING = Paging(32, attention="sdpa")
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.8)]


def memories(tree):
    return {t.untyped_storage()._cdata for t in tree_leaves(tree) if isinstance(t, Tensor)}


class Recording(TorchDispatchMode):
    """Does a block's operations again on the memory that they used, without its host code."""

    def __init__(self):
        super().__init__()
        self._operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = memories((args, kwargs))
        made = [(i, leaf) for i, leaf in enumerate(tree_leaves(result)) if memories(leaf) - given]
        self._operations.append((func, args, kwargs, made))
        return result

    @torch.inference_mode()
    def replay(self):
        for func, args, kwargs, made in self._operations:
            leaves = tree_leaves(func(*args, **kwargs))
            for place, leaf in made:
                leaf.copy_(leaves[place])


def record(run):
    recording = Recording()
    with recording:
        run()
    return recording.replay


def runners(model, capture):
    """A runner of captured steps, and one of transformers' shapes."""
    captured, plain = (ModelRunner(loaded_model(copy.deepcopy(model)), 4, paging=paging)
                       for paging in (PAGING, Paging(32)))  # fmt: skip
    captured.accelerate(capture, compiled=False)
    return captured, plain


def random_ids(rng, *lengths):
    return [rng.randrange(VOCABULARY) for _ in range(rng.choice(lengths))]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_replays_equal_eager_steps(kind):
    captured, plain = runners(make_model(kind), record)
    rng, held, replays = random.Random(0), [[] for _ in range(4)], 0
    for _ in range(8):
        steps = []
        for slot in rng.sample(range(4), rng.choice([1, 2, 3])):
            kept = rng.randint(0, min(len(held[slot]), 140))
            new = random_ids(rng, 1, 5, 16)
            held[slot] = [*held[slot][:kept], *new]
            steps.append(Step(slot, kept, new, rng.randint(1, len(new))))
        before = len(captured._steps._graphs)
        found = captured.forward(steps)
        replays += before == len(captured._steps._graphs)
        for rows, expected in zip(found, plain.forward(steps), strict=True):
            torch.testing.assert_close(rows.logits, expected.logits, rtol=0, atol=1e-6)
    assert replays


def draws_of(sampling, count):
    rng = random.Random(1)
    return [
        Draw(Step(slot, 0, random_ids(rng, 1, 2, 2)), sampling, 7 + slot,
             max_tokens=count, confidences=True)
        for slot in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_replayed_proposals_are_those_of_single_steps(sampling):
    captured, plain = runners(make_model("llama"), record)
    for count in (7, 1):
        draws = draws_of(sampling, count)
        expected = plain.draw(draws)
        for _ in range(2):  # the second time replays
            for one, other in zip(captured.draw(draws), expected, strict=True):
                assert one.token_ids == other.token_ids
                assert one.confidences == pytest.approx(other.confidences, abs=1e-6)


def test_a_model_that_cannot_be_captured_runs_eagerly(caplog):
    def refuse(run):
        raise RuntimeError("it reads the device")

    captured, plain = runners(make_model("llama"), refuse)
    assert "not captured as graphs" in caplog.text
    step = Step(0, 0, [1, 2, 3], 3)
    (found,), (expected,) = captured.forward([step]), plain.forward([step])
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-6)


STEPS = [
    [Step(0, 0, [5, 6, 7, 8]), Step(2, 0, [9, 8, 7], 3, (0, 1)), Step(1, 0, [3] * 70, 2)],
    [Step(2, 2, [5, 6], 2), Step(0, 4, [7]), Step(3, 0, [3])],
    [Step(3, 1, [4], 0), Step(1, 70, [1, 2, 3], 3)],
]
"""Several sequences, a rollback and a long prompt."""


def unreadable(kind="llama", paging=None):
    """A runner on the device `meta`, of which any read is an error."""
    loaded = loaded_model(make_model(kind).to("meta"))
    return ModelRunner(loaded, 4, paging=paging)


@pytest.mark.parametrize("way", ["slots", "blocks", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_step_does_not_wait_for_its_device(kind, way):
    blocks = way in ("blocks", "graphs")
    runner = unreadable(kind, PAGING if blocks else None)
    if way == "graphs":
        runner._steps.capture(eagerly)
    for steps in STEPS:
        for step, rows in zip(steps, runner.forward(steps), strict=True):
            assert rows.logits.is_meta
            assert rows.logits.shape == (step.num_logits, VOCABULARY)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [7, 1])
def test_a_proposal_is_read_once(sampling, count, monkeypatch):
    class ReadError(Exception):
        pass

    def read(tensor):
        raise ReadError(tensor.shape)

    runner = unreadable(paging=PAGING)
    runner._steps.capture(eagerly)
    monkeypatch.setattr(Tensor, "cpu", read)
    with pytest.raises(ReadError):
        runner.draw(draws_of(sampling, count))
