"""Captured steps as graphs of the stand-in device: replays equal eager steps, and never wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flyspec.engine.captured.graphs import Replay
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
def device() -> None:
    register()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("target"), seed=3))


def capture(run: Any) -> Replay:
    run()  # sets up, as on CUDA
    graph = StandInGraph()
    with graph.capture():
        run()
    return graph.replay


def runners(target: str, slots: int = 4) -> tuple[ModelRunner, ModelRunner]:
    """A runner of graphs on the device, and a plain one on the CPU."""
    device, cpu = (
        ModelRunner(
            load_model(target, where, "float64"), slots, paging=Paging(BLOCK, attention=kind)
        )
        for where, kind in ((DEVICE, "sdpa"), ("cpu", "auto"))
    )
    device.accelerate(capture, compiled=False)
    return device, cpu


def test_replays_equal_eager_steps_and_never_wait(target: str) -> None:
    device, cpu = runners(target)
    rng = random.Random(0)
    held: list[list[int]] = [[] for _ in range(4)]
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
def test_a_proposal_is_read_once(target: str, sampling: SamplingParams) -> None:
    device, cpu = runners(target)
    rng = random.Random(1)
    for count in (15, 1, 7):
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


def test_what_is_captured_ahead_serves_the_first_requests(target: str) -> None:
    device, _ = runners(target, slots=2)
    steps = device._steps
    count = steps.capture_ahead()
    # 2 sizes of a batch; 3 lengths of a round, 2 of a drafter's first step, 4 continuations.
    assert count >= 2 * (3 + 2 + 4)
    device.forward([Step(slot, 0, [1, 2, 3], 3) for slot in range(2)])
    device.draw([Draw(Step(slot, 3, [4]), SamplingParams(), max_tokens=12) for slot in range(2)])
    assert steps.capture_ahead() == count


def test_a_model_that_cannot_be_captured_runs_eagerly(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    device, cpu = (
        ModelRunner(load_model(target, where, "float64"), 4, paging=Paging(BLOCK, attention="sdpa"))
        for where in (DEVICE, "cpu")
    )
    norm = device.model.model.norm
    forward = norm.forward

    def waits(hidden: Any) -> Any:
        assert float(hidden.abs().max()) > 0  # a read, as of rotations that depend on the length
        return forward(hidden)

    norm.forward = waits
    device.accelerate(capture, compiled=False)
    assert "not captured as graphs" in caplog.text
    step = Step(0, 0, [1, 2, 3], 3)
    (found,), (expected,) = device.forward([step]), cpu.forward([step])
    assert (found.logits.cpu() - expected.logits).abs().max() < 1e-12
