"""Graphs of the stand-in device: a block done again on the same memory, without its host code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
