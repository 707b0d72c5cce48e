"""Graphs of the stand-in device: a block done again on the same memory, without its host code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.stand_in import register
from tests.stand_in_counts import capturing, counting
from tests.stand_in_graph import StandInGraph

DEVICE = "standin"
either_mode = pytest.mark.usefixtures("stand_in")


@either_mode
def test_a_graph_replays_on_the_same_memory() -> None:
    x, total = torch.zeros(3, device=DEVICE), torch.zeros((), device=DEVICE)
    host, calls, scale = torch.tensor(10.0), [], 2

    def step() -> Tensor:
        calls.append(scale)
        total.add_(x.sum())
        rows = torch.arange(3, device=DEVICE) + x * scale
        rows[1:] *= host
        return rows.view(3, 1)

    graph = StandInGraph()
    with graph.capture():
        rows = step()
    assert total.item() == 0, "to capture computes nothing"
    assert rows.isnan().all()
    host += 1
    scale = 3
    for turn in range(1, 4):
        x.copy_(torch.tensor([turn, 0, turn]))
        with counting() as counts:
            graph.replay()
        assert (counts.operations, counts.where) == (1, [])
        assert rows.tolist() == [[2 * turn], [10], [10 * (2 + 2 * turn)]]
        assert total.item() == turn * (turn + 1)
    assert calls == [2], "the host's numbers are those of the capture"


@either_mode
def test_a_graph_is_captured_once_and_not_within_another() -> None:
    x, graph = torch.zeros(2, device=DEVICE), StandInGraph()
    with pytest.raises(RuntimeError, match="nothing is captured"):
        graph.replay()

    def step(read: bool) -> None:
        x.add_(1)
        if read:
            x[0].item()

    with pytest.raises(RuntimeError, match="copies device memory"), graph.capture():
        step(read=True)
    assert x.tolist() == [0, 0], "a failed capture leaves memory as it was"
    with graph.capture():
        step(read=False)
        with pytest.raises(RuntimeError, match="end that capture first"), capturing():
            pass
        with pytest.raises(RuntimeError, match="cannot be replayed within a capture"):
            graph.replay()
    assert len(graph) == 1
    with pytest.raises(RuntimeError, match="use a new StandInGraph"), graph.capture():
        pass


Memory = list[Tensor]
"""Two matrices [3, 3] and a vector [3] from before a block, and what it has made of them."""
ACTS: list[Callable[[Memory, int], object]] = [
    lambda m, i: m.append(m[i] * 2 - m[0].sum()),
    lambda m, i: m.append(m[i].clone()),
    lambda m, i: m.append(torch.zeros_like(m[i])),
    lambda m, i: m.append(m[i].flatten()[-3:]),  # a view of another's memory
    lambda m, i: m.append(m[i].t()),
    lambda m, i: m.append(m[i].sort(dim=0).values),
    lambda m, i: m.append(torch.full((3,), i, dtype=torch.float64, device=m[0].device)),
    lambda m, i: m[i].add_(m[2]),
    lambda m, i: m[i].copy_(m[1 - i % 2].clone()[:3].sum(0)),
    lambda m, i: m[i].clamp_(-9, 9).neg_(),
    lambda m, i: m[i].masked_fill_(m[i] > 1, 0.5),
    lambda m, i: m[i].index_copy_(0, m[2].argsort()[:1], m[i][-1:].clone()),
    lambda m, i: m[i].__setitem__(0, 3.0) if m[i].dim() > 1 else None,
]


@given(
    program=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9)), min_size=1, max_size=12),
    inference=st.booleans(),
)
def test_any_program_replayed_equals_the_program_run_again(program, inference) -> None:
    """The oracle runs it on a CPU, each time anew, on memory that keeps what it wrote."""
    register()

    def run(memory: Memory) -> Memory:
        made = list(memory)
        for act, index in program:
            act(made, index % len(made))
        return made

    with torch.inference_mode(inference):
        before = [torch.arange(9.0).view(3, 3).double(), -torch.eye(3).double(), torch.ones(3)]
        before[2] = before[2].double()
        memory, ours = [x.clone() for x in before], [x.to(DEVICE) for x in before]
        graph = StandInGraph()
        with graph.capture():
            made = run(ours)
        assert [x.tolist() for x in ours] == [x.tolist() for x in before]
        for _ in range(3):
            graph.replay()
            expected = run(memory)
            assert [x.tolist() for x in made] == [x.tolist() for x in expected]
