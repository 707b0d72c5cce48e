"""Describes what determines a model's bits besides its weights, as a string to compare.

Replicas with equal strings generate the same text with `exact`; others round differently, and
diverge at a near-tie sooner or later.
"""

from __future__ import annotations

import torch
import transformers
from torch import distributed

from flyspec.values.admin import BATCH_INVARIANT


def native_numerics(instruction_set: str) -> str:
    """Describe the native step: its bits depend on neither threads nor batch (docs/engine.md)."""
    return ", ".join(("bfloat16", f"native step for {instruction_set}", BATCH_INVARIANT))


def torch_numerics(model: torch.nn.Module, batch_invariant: bool, how: str = "") -> str:
    """Describe transformers' modules, and how their steps are run.

    Their kernels differ by release, processor and number of threads, and the ranks of a
    tensor-parallel group sum their shares.
    """
    parameter = next(model.parameters())
    if parameter.device.type == "cuda":
        device = torch.cuda.get_device_name(parameter.device)
    else:
        amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
        device = f"{torch.backends.cpu.get_cpu_capability()}{amx}, {_threads()}"
    parts = [
        str(parameter.dtype).removeprefix("torch."),
        f"transformers {transformers.__version__}",
        f"torch {torch.__version__}",
        device,
    ]
    if how:
        parts.append(how)
    if distributed.is_available() and distributed.is_initialized():
        parts.append(f"{distributed.get_world_size()} ranks")
    return ", ".join([*parts, BATCH_INVARIANT] if batch_invariant else parts)


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
