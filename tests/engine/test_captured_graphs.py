"""Steps on the stand-in device, eager or captured as graphs, equal the CPU's and never wait."""

import random

import pytest
import torch

from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.values.tokens import SamplingParams
from tests.stand_in import NAME as DEVICE
from tests.stand_in import register
from tests.stand_in_counts import counting
from tests.stand_in_graph import StandInGraph
from tests.tiny import VOCAB_SIZE, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 32
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.8)]


@pytest.fixture(scope="module", autouse=True)
def device():
    register()


@pytest.fixture(scope="module")
def target(model_dirs):
    return model_dirs[0]


def capture(run):
    run()  # sets up, as on CUDA
    graph = StandInGraph()
    with graph.capture():
        run()
    return graph.replay


def runners(target, slots=4):
    """A runner of graphs on the device, and a plain one on the CPU."""
    device, cpu = (
        ModelRunner(
            load_model(target, where, "float64"), slots, paging=Paging(BLOCK, attention=kind)
        )
        for where, kind in ((DEVICE, "sdpa"), ("cpu", "auto"))
    )
    device.accelerate(capture, compiled=False)
    return device, cpu


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_replays_equal_eager_steps_and_never_wait(kind, tmp_path):
    device, cpu = runners(str(make_model(tmp_path, seed=3, kind=kind)))
    rng = random.Random(0)
    held = [[] for _ in range(4)]
    replays = 0
    for _ in range(8):
        steps = []
        for slot in rng.sample(range(4), rng.choice([1, 2, 3])):
            kept = rng.randint(0, len(held[slot]))
            new = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 5, 16]))]
            held[slot] = [*held[slot][:kept], *new][:200]
            steps.append(Step(slot, kept, held[slot][kept:], rng.randint(1, len(new))))
        captured = len(device._steps._graphs)
        with counting() as counts:
            found = device.forward(steps)
        assert counts.synchronizations == 0, counts.where
        if captured == len(device._steps._graphs):
            replays += 1
            # The step's inputs, and what changed in the block table.
            assert counts.writes <= 2, counts.where
            # The graph, the copies of shared blocks, the table's changes.
            assert counts.operations < 12
        for rows, expected in zip(found, cpu.forward(steps), strict=True):
            assert (rows.logits.cpu() - expected.logits).abs().max() < 1e-12
    assert replays


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_proposal_is_read_once(target, sampling):
    device, cpu = runners(target)
    rng = random.Random(1)
    for count in (7, 1):
        draws = []
        for slot in range(3):
            ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 2]))]
            step = Step(slot, 0, ids)
            draws.append(Draw(step, sampling, 7 + slot, max_tokens=count, confidences=True))
        first = device.draw(draws)  # captures
        with counting() as counts:
            found = device.draw(draws)
        assert counts.reads == counts.synchronizations == 1, counts.where
        parts = 1 + count.bit_length()
        assert counts.writes <= parts + 1, counts.where  # one per program, and the block table
        assert counts.operations <= 6 * parts
        assert [drafted.token_ids for drafted in first] == [d.token_ids for d in found]
        for one, other in zip(found, cpu.draw(draws), strict=True):
            assert one.token_ids == other.token_ids
            assert one.confidences == pytest.approx(other.confidences, abs=1e-9)


def test_a_model_that_cannot_be_captured_runs_eagerly(target, caplog):
    device, cpu = (
        ModelRunner(load_model(target, where, "float64"), 4, paging=Paging(BLOCK, attention="sdpa"))
        for where in (DEVICE, "cpu")
    )
    norm = device.model.model.norm
    forward = norm.forward

    def waits(hidden):
        assert float(hidden.abs().max()) > 0  # a read, as of rotations that depend on the length
        return forward(hidden)

    norm.forward = waits
    device.accelerate(capture, compiled=False)
    assert "not captured as graphs" in caplog.text
    step = Step(0, 0, [1, 2, 3], 3)
    (found,), (expected,) = device.forward([step]), cpu.forward([step])
    assert (found.logits.cpu() - expected.logits).abs().max() < 1e-12


@pytest.mark.parametrize("padded", [False, True])
def test_the_runner_over_slots_never_waits_for_the_device(target, padded):
    """Steps of several sequences, a rollback and a long prompt."""
    device, cpu = (
        ModelRunner(load_model(target, where, "float64"), 4, padded) for where in (DEVICE, "cpu")
    )
    for steps in (
        [Step(0, 0, [5, 6, 7, 8]), Step(2, 0, [9, 8, 7], 3, (0, 1)), Step(1, 0, [*range(70)], 2)],
        [Step(2, 2, [5, 6], 2), Step(0, 4, [7]), Step(3, 0, [3])],
        [Step(3, 1, [4], 0), Step(1, 70, [1, 2, 3], 3)],
    ):
        with counting() as counts:
            found = device.forward(steps)
        assert counts.synchronizations == 0, counts.where
        for rows, expected in zip(found, cpu.forward(steps), strict=True):
            torch.testing.assert_close(rows.logits.cpu(), expected.logits)
            for hidden, own in zip(rows.hidden, expected.hidden, strict=True):
                torch.testing.assert_close(hidden.cpu(), own)
