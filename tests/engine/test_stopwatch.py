"""The stopwatch's scale: that of the clock, from its start to its end."""

from time import perf_counter_ns

import pytest
import torch

from flyspec.engine.stopwatch import Stopwatch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_mark_lies_between_start_and_end(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    values = torch.ones(64, 64, device=device)
    begin = perf_counter_ns()
    watch = Stopwatch(device)
    total = values @ values
    watch.mark()
    assert float((total @ values).sum()) > 0
    assert begin <= watch.marked_ns <= perf_counter_ns()
