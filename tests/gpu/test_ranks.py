"""A service on a GPU, and one of two ranks with a GPU each, against transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.gpu.devices import DEVICE, MARKS, ON_CUDA
from tests.parallel.test_tensor_parallel import (
    client_of,
    ends_in_order,
    generates,
    serving,
    texts_of,
)
from tests.tiny import make_model

pytestmark = [*MARKS, pytest.mark.timeout(400)]

# Heads of a size that FlexAttention has kernels for.
HEADS = {"hidden_size": 128, "num_attention_heads": 8}


@pytest.mark.parametrize("size", [1, 2])
async def test_ranks_give_the_text_of_transformers(size: int, tmp_path: Path) -> None:
    if ON_CUDA and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, since NCCL wants one for each rank")
    model = str(make_model(tmp_path, seed=4, **HEADS))
    async with serving(model, "--device", DEVICE.type, "--dtype", "float32", size=size) as running:
        async with client_of(running.service.facts["port"]) as client:
            await generates(client, texts_of(model))
        await ends_in_order(running)
    log = "\n".join(running.log)
    assert re.search(f"loaded .*, float32 on {DEVICE.type}", log)
    if size > 1:
        held = re.findall(r"rank (\d) of 2 holds ([\d.]+) of ([\d.]+) MB", log)
        assert sorted(rank for rank, *_ in held) == ["0", "1"]
        for _, own, total in held:
            assert float(own) < 0.7 * float(total)  # half, and what is not split
