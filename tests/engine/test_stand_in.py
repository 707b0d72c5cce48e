"""The stand-in device: what it counts, what it refuses, and that it computes as a CPU does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner
from flyspec.values.tokens import SamplingParams
from tests.stand_in_counts import capturing, counting
from tests.tiny import make_model

DEVICE = "standin"
pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), seed=3)


def numbers() -> Tensor:
    """[2, 3] integers on the device."""
    return torch.arange(6, device=DEVICE).view(2, 3)


def twos(x: Tensor) -> Tensor:
    """The number of repetitions of each row of `x`."""
    return torch.full((x.shape[0],), 2, device=DEVICE)


READS: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: x.to("cpu"),
    "to like another": lambda x: x.to(torch.zeros(1)),
    "copy_": lambda x: torch.zeros(2, 3).copy_(x),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 1].item(),
    "if": lambda x: 1 if (x == 3).any() else 0,
    "as an index": lambda x: x[x[0, 1]],
    "in a string": lambda x: f"{x}",
    "numpy": lambda x: x.numpy(force=True),
    "equal": lambda x: torch.equal(x, x),
}
HIDDEN: dict[str, Callable[[Tensor], object]] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 2),
    "mask": lambda x: x[x > 2],
    "masked_select": lambda x: x.masked_select(x > 2),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(twos(x), dim=0),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: torch.tensor([1, 2], device=DEVICE),
    "to": lambda x: torch.zeros(3).to(DEVICE),
    "copy_": lambda x: x.copy_(torch.zeros(2, 3)),
    "one element": lambda x: x.__setitem__((0, 0), 5),
    "index on the CPU": lambda x: x[torch.tensor([1])],
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1) / x.sum(),
    "a number on the CPU": lambda x: x + torch.tensor(3),
    "index on the device": lambda x: x[x[0, :2] % 2],
    "mask with a number": lambda x: x.__setitem__(x > 2, 5),
    "known size": lambda x: x.repeat_interleave(twos(x), dim=0, output_size=4),
}
ACTS = [
    *((act, {"reads": 1, "writes": 0, "hidden": 0}, "copies device memory")
      for act in READS.values()),
    *((act, {"reads": 0, "writes": 0, "hidden": 1}, "shape of its result depends on data")
      for act in HIDDEN.values()),
    *((act, {"reads": 0, "writes": 1, "hidden": 0}, "copies host memory to the device")
      for act in WRITES.values()),
]  # fmt: skip


def counted(act: Callable[[Tensor], object], x: Tensor) -> dict[str, int]:
    with counting() as counts:
        act(x)
    assert counts.synchronizations == counts.reads + counts.hidden
    assert len(counts.where) == counts.synchronizations + counts.writes
    assert all(stray.place.startswith("tests/engine/test_stand_in.py:") for stray in counts.where)
    return {name: getattr(counts, name) for name in ("reads", "writes", "hidden")}


@pytest.mark.parametrize(("act", "expected", "refusal"), ACTS, ids=[*READS, *HIDDEN, *WRITES])
def test_what_waits_is_counted_and_refused_within_a_capture(
    act: Callable[[Tensor], object], expected: dict[str, int], refusal: str
) -> None:
    assert counted(act, numbers()) == expected
    with capturing(), pytest.raises(RuntimeError, match=refusal):
        act(numbers())


@pytest.mark.parametrize("name", FREE)
def test_what_stays_on_the_device_is_free(name: str) -> None:
    assert not any(counted(FREE[name], numbers()).values())
    with capturing():
        FREE[name](numbers())


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + torch.zeros(2, 3),
        lambda x: torch.zeros(2, 3).add_(x),
        lambda x: torch.add(x, x, out=torch.zeros(2, 3, dtype=x.dtype)),
    ],
)
def test_tensors_of_two_devices_do_not_mix(act: Callable[[Tensor], object]) -> None:
    with counting() as counts, pytest.raises(RuntimeError, match="at least two devices"):
        act(numbers())
    assert counts.reads == 0


@pytest.mark.parametrize("padded", [False, True])
def test_the_runner_never_waits_for_the_device(target: Path, padded: bool) -> None:
    """Steps of several sequences, a rollback and a long prompt: rows are the CPU's."""
    runners = [
        ModelRunner(load_model(str(target), device, "float64"), 4, padded)
        for device in (DEVICE, "cpu")
    ]
    for steps in (
        [Step(0, 0, [5, 6, 7, 8]), Step(2, 0, [9, 8, 7], 3, (0, 1)), Step(1, 0, [*range(70)], 2)],
        [Step(2, 2, [5, 6], 2), Step(0, 4, [7]), Step(3, 0, [3])],
        [Step(3, 1, [4], 0), Step(1, 70, [1, 2, 3], 3)],
    ):
        with counting() as counts:
            found = runners[0].forward(steps)
        assert counts.synchronizations == 0, counts.where
        assert {stray.place.rpartition("/")[0] for stray in counts.where} <= {
            "flyspec/engine",
            "flyspec/engine/attention",
        }
        for rows, expected in zip(found, runners[1].forward(steps), strict=True):
            assert rows.logits.device.type == DEVICE
            torch.testing.assert_close(rows.logits.cpu(), expected.logits)
            for hidden, own in zip(rows.hidden, expected.hidden, strict=True):
                torch.testing.assert_close(hidden.cpu(), own)


def test_the_runner_draws_the_tokens_that_it_draws_on_a_cpu(target: Path) -> None:
    sampling = SamplingParams(temperature=0.7)
    draws = [Draw(Step(slot, 0, [slot, 7]), sampling, slot, max_tokens=5) for slot in range(3)]
    greedy = Draw(Step(3, 0, [5]), SamplingParams(temperature=0.0), max_tokens=3)
    found = []
    for device in (DEVICE, "cpu"):
        runner = ModelRunner(load_model(str(target), device, "float64"), 4)
        found.append([drafted.token_ids for drafted in runner.draw([*draws, greedy])])
    assert found[0] == found[1]
