"""measurements/gpu.md and serve-your-own-models.md have what the services' planner calculates."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.sizes import (
    BANDWIDTH,
    DTYPE,
    EXAMPLE,
    EXAMPLE_LEN,
    GPUS,
    H100,
    RANKS,
    SHARES,
    Served,
    example_tables,
    fitting_tables,
    tokens_per_round,
)
from flyspec.engine import cache_size
from flyspec.engine.cache_size import Fit, check_fits
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from tests.deployment.rendered import ROOT

DOCUMENT = ROOT / "docs" / "measurements" / "gpu.md"


@pytest.mark.parametrize(
    ("document", "tables"),
    [(DOCUMENT, example_tables), (ROOT / "docs" / "serve-your-own-models.md", fitting_tables)],
    ids=["example", "fitting"],
)
def test_the_documents_have_what_the_planner_says(
    document: Path, tables: Callable[[], dict[str, str]]
) -> None:
    """Otherwise run `python -m bench.sizes`."""
    for name, table in tables().items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- /{name} -->" in document.read_text(), name


@pytest.mark.parametrize("one", EXAMPLE, ids=["target", "draft"])
def test_the_planner_is_the_one_that_services_ask(
    one: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = one.weight_bytes // DTYPE.itemsize
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    memory = DeviceMemory(GPUS[H100], GPUS[H100] - OUTSIDE_TORCH, OUTSIDE_TORCH)
    monkeypatch.setattr(cache_size, "device_memory", lambda device: memory)
    told: list[Fit] = []
    monkeypatch.setattr(Fit, "tell", lambda fit, plan: told.append(fit))
    device = torch.device("cuda", 0)
    check_fits(one.settings, Checkpoint(
        one.shape, one.config, DTYPE, device, EXAMPLE_LEN, one.ranks, weights
    ))  # fmt: skip
    assert told[0].taken == one.fit.taken
    assert (told[0].limit, told[0].left) == (one.fit.limit, one.fit.left)
    assert one.cache_tokens >= EXAMPLE_LEN


def test_the_command_is_that_of_the_example() -> None:
    block = re.search(r"(flyspec serve.*?)\n```", DOCUMENT.read_text(), re.DOTALL)
    assert block
    words = shlex.split(block[1].replace("\\\n", " "))
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert flags["--tensor-parallel-size"] == str(RANKS)
    assert flags["--max-model-len"] == str(EXAMPLE_LEN)
    assert float(flags["--gpu-memory-utilization"]) == SHARES["target"]
    assert float(flags["--draft-gpu-memory-utilization"]) == SHARES["draft"]
    assert sum(SHARES.values()) < 0.95


def test_bounds_by_hand() -> None:
    """70.55 and 8.03 billion weights of two bytes; the cache adds a percent."""
    rows = [row.strip("| ").split(" | ") for row in example_tables()["bounds"].splitlines()]
    rates = {(row[0], row[1]): float(row[-1]) for row in rows[2:]}
    plain, drafted = 141.1e9 / 4 / BANDWIDTH, 16.06e9 / BANDWIDTH
    assert rates["none", "-"] == pytest.approx(1 / plain, rel=0.02)
    found = rates["llama-8b, K = 15", "0.9"]
    tokens = sum(0.9**i for i in range(16))
    assert tokens_per_round(0.9, 15) == pytest.approx(tokens)
    assert found == pytest.approx(tokens / (plain + 15 * drafted), rel=0.05)


def test_packages_to_carry_are_of_the_versions_tested() -> None:
    def names(file: Path) -> set[str]:
        lines = file.read_text().splitlines()
        return {re.split("==", line)[0].lower().replace("_", "-") for line in lines
                if line and not line.startswith("#")}  # fmt: skip

    assert names(ROOT / "bench" / "gpu" / "wheels.txt") <= names(ROOT / "constraints.txt")
