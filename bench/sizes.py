"""`python -m bench.sizes`: writes what fits on which GPUs into docs/serve-your-own-models.md.

The services' own planner (`flyspec.engine.cache_size`) calculates it, as before they load a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine.cache_size import Fit, KVCachePlan, plan_fit, readable, slot_bytes
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.tables import markdown
from flyspec_lab.bench.shapes import config_of
from flyspec_lab.report import write_into

L4, H100, H200 = "24 GB (L4)", "80 GB (H100)", "141 GB (H200)"
GPUS = {L4: 23_034 << 20, H100: 81_559 << 20, H200: 143_771 << 20}
"""Memory that the driver reports, in bytes."""
DTYPE = torch.bfloat16
MAX_MODEL_LEN = 8_192
FITTING = {
    "targets": (
        ("llama-8b", 1, L4),
        ("llama-8b", 1, H100),
        ("llama-70b", 2, H100),
        ("llama-70b", 4, H100),
        ("llama-70b", 8, H100),
        ("llama-70b", 2, H200),
        ("llama-405b", 8, H100),
        ("llama-405b", 16, H100),
        ("llama-405b", 8, H200),
    ),
    "drafts": (("llama-1b", 1, L4), ("llama-8b", 1, L4), ("llama-8b", 1, H100)),
}
"""Shapes, their numbers of GPUs, and the GPU, by the name of the table's marks."""


@cache
def num_parameters(shape: str) -> int:
    """Return the number of weights of a model of a shape."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config_of(shape)).num_parameters())


def fit_of(
    settings: ModelServerSettings, config: Any, total: int, parameters: int, ranks: int
) -> tuple[Fit, Callable[[], KVCachePlan]]:
    """Return a service's plan before it reads weights, on GPUs of `total` bytes each."""
    device = torch.device("cuda", 0)
    model = Checkpoint("model", config, DTYPE, device, settings.max_model_len, ranks, Path())
    memory = DeviceMemory(total, total - OUTSIDE_TORCH, OUTSIDE_TORCH)
    return plan_fit(settings, model, memory, parameters * DTYPE.itemsize)


def fitting_tables() -> dict[str, str]:
    """Return the tables of targets and draft models that fit, by the name of their marks."""
    columns = ["model", "GPUs", "weights", "activations", "left for the cache", "a token",
               "tokens", f"sessions of {MAX_MODEL_LEN:,}"]  # fmt: skip
    return {
        name: markdown(columns, [_row(name, *model) for model in models])
        for name, models in FITTING.items()
    }


def _row(table: str, shape: str, ranks: int, gpu: str) -> list[str]:
    config = config_of(shape)
    service = DraftSettings if table == "drafts" else VerifySettings
    settings = service(model=shape, max_model_len=MAX_MODEL_LEN)
    fit, _ = fit_of(settings, config, GPUS[gpu], num_parameters(shape), ranks)
    of_token = slot_bytes(config, 1, DTYPE, ranks)
    tokens = fit.left // of_token
    row = [shape.removeprefix("llama-").upper(), f"{ranks} x {gpu}",
           readable(fit.taken["weights"]), readable(fit.taken["activations"])]  # fmt: skip
    if tokens < MAX_MODEL_LEN:
        return [*row, f"does not fit in {readable(fit.limit)}", "", "", "0"]
    return [*row, readable(fit.left), readable(of_token), f"{tokens:,}",
            f"{tokens // MAX_MODEL_LEN:,}"]  # fmt: skip


if __name__ == "__main__":
    write_into(Path("docs/serve-your-own-models.md"), fitting_tables())
