"""Four ranks that share one GPU, their sums over gloo: the text and the weights of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flyspec.engine.parallel import SHARE_GPU
from tests.gpu.devices import DEVICE, MARKS
from tests.parallel.test_tensor_parallel import (
    client_of,
    ends_in_order,
    generates,
    serving,
    texts_of,
)
from tests.tiny import make_model

pytestmark = [*MARKS, pytest.mark.timeout(400)]

# Each rank takes a share of the GPU by itself, so their caches are given sizes.
FLAGS = ("--device", DEVICE.type, "--dtype", "float32", "--kv-cache-memory-bytes", "200000000")


@pytest.mark.parametrize("size", [1, 4])
async def test_ranks_that_share_a_gpu(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_GPU, "1")
    # Heads that FlexAttention has kernels for; with four ranks, a KV head on two of them each.
    model = str(make_model(tmp_path, seed=4, hidden_size=128, num_attention_heads=8))
    async with serving(model, *FLAGS, size=size) as running:
        async with client_of(running.service.facts["port"]) as client:
            await generates(client, texts_of(model))
        await ends_in_order(running)
    assert re.search(f"loaded .*, float32 on {DEVICE.type}", "\n".join(running.log))
    if size > 1:
        held = re.findall(r"rank (\d) of 4 holds ([\d.]+) of ([\d.]+) MB", "\n".join(running.log))
        assert sorted(rank for rank, *_ in held) == ["0", "1", "2", "3"]
        for _, own, total in held:
            # A quarter, and what is not split; half of the KV heads.
            assert float(own) < 0.45 * float(total)
