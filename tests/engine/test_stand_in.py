"""The stand-in device: what it counts, what it refuses, and that it computes as a CPU does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner
from flyspec.values.tokens import SamplingParams
from tests.stand_in import StandInTensor
from tests.stand_in_counts import capturing, counting
from tests.tiny import VOCAB_SIZE, make_model

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
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to, another type": lambda x: x.to("cpu", torch.float64),
    "to like another": lambda x: x.to(torch.zeros(1)),
    "not blocking": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.zeros(2, 3).copy_(x),
    "tolist": lambda x: x.tolist(),
    "tolist of a number": lambda x: x[0, 1].tolist(),
    "item": lambda x: x[0, 1].item(),
    "bool": lambda x: bool(x[0, 1]),
    "if": lambda x: 1 if (x == 3).any() else 0,
    "int": lambda x: int(x[0, 1]),
    "float": lambda x: float(x[0, 1]),
    "index": lambda x: range(9)[x[0, 1]],
    "as an index": lambda x: x[x[0, 1]],
    "in a string": lambda x: f"{x[0, 1]}",
    "all in a string": lambda x: f"{x}",
    "shown": repr,
    "numpy": lambda x: x.numpy(force=True),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
}
HIDDEN: dict[str, Callable[[Tensor], object]] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero as tuple": lambda x: (x > 2).nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 2),
    "argwhere": lambda x: torch.argwhere(x),
    "mask": lambda x: x[x > 2],
    "mask of rows": lambda x: x[x[:, 0] > 0, :2],
    "masked_select": lambda x: x.masked_select(x > 2),
    "write under a mask": lambda x: x.__setitem__(x > 2, torch.zeros(3, dtype=x.dtype).to(DEVICE)),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.flatten().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(twos(x), dim=0),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: torch.tensor([1, 2], device=DEVICE),
    "number": lambda x: torch.tensor(1, device=DEVICE),
    "as_tensor": lambda x: torch.as_tensor([1], device=DEVICE),
    "new_tensor": lambda x: x.new_tensor([1]),
    "to": lambda x: torch.zeros(3).to(DEVICE),
    "copy_": lambda x: x.copy_(torch.zeros(2, 3)),
    "one element": lambda x: x.__setitem__((0, 0), 5),
    "index on the CPU": lambda x: x[torch.tensor([1])],
    "mask on the CPU": lambda x: x[torch.tensor([True, False])],
    "index_put_ on the CPU": lambda x: x.__setitem__(torch.tensor([1]), x[0] + 1),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1) / x.sum(),
    "a number on the CPU": lambda x: x + torch.tensor(3),
    "index on the device": lambda x: x[x[0, :2] % 2],
    "mask with a number": lambda x: x.__setitem__(x > 2, 5),
    "rows with a number": lambda x: x.__setitem__(slice(1), 5),
    "masked_fill_": lambda x: x.masked_fill_(x > 2, 0),
    "where of three": lambda x: torch.where(x > 2, x, 0),
    "known size": lambda x: x.repeat_interleave(twos(x), dim=0, output_size=4),
    "to its own device": lambda x: x.to(DEVICE),
    "another type": lambda x: x.to(torch.float64),
    "empty on the CPU": lambda x: torch.empty_like(x, device="cpu"),
}


def counted(act: Callable[[Tensor], object], x: Tensor) -> dict[str, int]:
    with counting() as counts:
        act(x)
    assert counts.synchronizations == counts.reads + counts.hidden
    assert len(counts.where) == counts.synchronizations + counts.writes
    assert all(stray.place.startswith("tests/engine/test_stand_in.py:") for stray in counts.where)
    return {name: getattr(counts, name) for name in ("reads", "writes", "hidden")}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    assert counted(READS[name], numbers()) == {"reads": 1, "writes": 0, "hidden": 0}
    with capturing(), pytest.raises(RuntimeError, match=r"test_stand_in.*copies device memory"):
        READS[name](numbers())


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_synchronizations(name: str) -> None:
    counts = counted(HIDDEN[name], numbers())
    assert (counts["reads"], counts["hidden"]) == (0, 1)
    if not counts["writes"]:
        with capturing(), pytest.raises(RuntimeError, match="shape of its result depends on data"):
            HIDDEN[name](numbers())


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    assert counted(WRITES[name], numbers()) == {"reads": 0, "writes": 1, "hidden": 0}
    with capturing(), pytest.raises(RuntimeError, match="copies host memory to the device"):
        WRITES[name](numbers())


@pytest.mark.parametrize("name", FREE)
def test_what_stays_on_the_device_is_free(name: str) -> None:
    assert not any(counted(FREE[name], numbers()).values())
    with capturing():
        FREE[name](numbers())


def test_numpy_is_refused_as_by_cuda() -> None:
    with counting() as counts, pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        numbers().numpy()
    assert counts.reads == 1


def test_explicit_synchronization() -> None:
    with counting() as counts:
        torch.standin.synchronize()  # type: ignore[attr-defined]
    assert (counts.synchronizations, counts.where[0].kind) == (1, "synchronize")
    with capturing(), pytest.raises(RuntimeError, match=r"synchronize .* waits for the device"):
        torch.standin.synchronize()  # type: ignore[attr-defined]


def test_several_reads_and_nested_counts() -> None:
    x = numbers()
    with counting() as outer:
        [row.tolist() for row in x]
        with counting() as inner:
            x.cpu()
        assert (outer.reads, inner.reads) == (3, 1)
    x.cpu()
    assert outer.reads == 3


def test_operations_are_launches() -> None:
    x = numbers().float()
    with counting() as counts:
        view = x.t()[1:].unsqueeze(0).reshape(-1, 2)
        torch.empty(3, device=DEVICE)
        x.cpu()
    assert (view.shape, counts.operations) == ((2, 2), 0)
    with counting() as counts:
        torch.zeros(3, device=DEVICE)
        torch.arange(3, device=DEVICE)
        x += 1
        x @ x.t()
        x.t().contiguous()
        torch.nn.functional.linear(x, x)
    assert counts.operations == 6


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + torch.zeros(2, 3),
        lambda x: torch.cat([x, torch.zeros(2, 3)]),
        lambda x: torch.zeros(2, 3).add_(x),
        lambda x: torch.tensor(1).add_(x[0, 0]),
        lambda x: torch.zeros(2, 3)[x[0]],
        lambda x: x.__setitem__(x[0, :2] % 2, torch.zeros(2, 3, dtype=x.dtype)),
        lambda x: torch.add(x, x, out=torch.zeros(2, 3, dtype=x.dtype)),
    ],
)
def test_tensors_of_two_devices_do_not_mix(act: Callable[[Tensor], object]) -> None:
    with counting() as counts, pytest.raises(RuntimeError, match="at least two devices"):
        act(numbers())
    assert counts.reads == 0


def test_views_share_memory() -> None:
    x = torch.zeros(4, 3, device="standin")
    assert isinstance(x, StandInTensor)
    assert str(x.device) == "standin:0"
    assert x.is_standin  # type: ignore[attr-defined]
    row, across, column = x[1], x.t(), x.view(-1).as_strided((4,), (3,), 2)
    row += 1
    across[2].fill_(7)
    x[3:, :1] = 5
    assert x.tolist() == [[0, 0, 7], [1, 1, 7], [0, 0, 7], [5, 0, 7]]
    assert row.tolist() == [1, 1, 7]
    assert column.tolist() == [7, 7, 7, 7]
    x.t_()
    assert (x.shape, x.stride(), x[2].tolist()) == ((3, 4), (1, 3), [7, 7, 7, 7])
    out = torch.empty(0, device=DEVICE)
    assert torch.add(x, 1, out=out) is out
    assert (out.shape, out[2].tolist()) == ((3, 4), [8, 8, 8, 8])


def test_views_in_inference_mode_of_a_tensor_from_outside() -> None:
    """As on a CPU: they are ordinary tensors too, and what is computed is not."""
    with torch.inference_mode(False):
        x = torch.zeros(2, 3, device=DEVICE)
    with torch.inference_mode():
        row = x[1]
        row += 1
        assert (row.is_inference(), (x + 1).is_inference()) == (False, True)
    assert x.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_rows_written_by_index_as_in_a_cache() -> None:
    cache = torch.zeros(6, 2, device=DEVICE)
    slots = cache.view(2, 3, 2)
    index, rows = torch.tensor([4, 1], device=DEVICE), torch.ones(2, 2, device=DEVICE)
    with counting() as counts:
        cache.index_copy_(0, index, rows)
        slots[1, :2] = slots[0, 1:]
    assert (counts.synchronizations, counts.writes, counts.operations) == (0, 0, 2)
    assert slots[:, :, 0].tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: x.topk(2).indices,
        lambda x: x.sort(descending=True).values,
        lambda x: x.cumsum(-1),
        lambda x: x.argmax(-1),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.nn.functional.embedding(x.argsort(1), x[0]),
        lambda x: torch.einsum("bij,bkj->bik", x, x),
        lambda x: torch.stack([x, x]).amax((0, -1)),
        lambda x: torch.where(x > 0, x, -torch.inf).logsumexp(-1),
    ],
)
def test_computes_as_a_cpu_does(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(function(x.to(DEVICE)).cpu(), function(x))


def test_torch_seeds_and_forks_its_generator() -> None:
    torch.manual_seed(7)
    with torch.random.fork_rng():
        first = torch.randn(3, device=DEVICE)
    again = torch.randn(3, device=DEVICE)
    torch.manual_seed(7)
    assert first.tolist() == again.tolist() == torch.randn(3).tolist()


def test_a_transformers_model(target: Path) -> None:
    """Its logits are the CPU's; that its own masks wait for the device is seen."""
    own = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).to("standin")
    assert model.device.type == DEVICE
    text = torch.randint(VOCAB_SIZE, (1, 9))
    with counting() as counts:
        logits = model(text.to(DEVICE), use_cache=False).logits
    torch.testing.assert_close(logits.cpu(), own(text, use_cache=False).logits)
    assert counts.operations > 50
    assert (counts.reads, counts.writes) == (1, 1)
    assert any(stray.inside.startswith("transformers/masking_utils.py:") for stray in counts.where)


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
