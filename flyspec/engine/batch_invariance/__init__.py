"""Batch-invariant mode: a token's logits have the same bits whatever else a step contains.

This package applies the mode to a model (`tiles` for its layers, `fixed_shapes` for its attention)
and checks that it works. Steps may differ in K, other sessions, how a prompt is cut into pieces,
and whether a prefix was computed before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flyspec.engine.batch_invariance import tiles
from flyspec.engine.batch_invariance.fixed_shapes import FixedShapeAttention
from flyspec.engine.batch_invariance.tiles import untile as remove
from flyspec.engine.model import Model, Step
from flyspec.errors import ConfigError

__all__ = ["FixedShapeAttention", "apply", "holds", "remove"]

_ALONE = 8
_TRIAL_LENGTH = 90


def apply(name: str, model: Any, wanted: bool | None) -> bool:
    """Apply the mode to a model if it is wanted, or if `wanted` is None and it costs little there.

    Returns whether it is on; if so, use `FixedShapeAttention`. Raises `ConfigError` if it is wanted
    but unavailable.
    """
    obstacle = None
    if model.device.type != "cpu":
        obstacle = f"works only on CPUs, and {name} is on {model.device}; use --device cpu"
    elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        obstacle = "sums across ranks depend on the batch; use --tensor-parallel-size 1"
    if wanted is False or (wanted is None and (obstacle or model.dtype != torch.bfloat16)):
        return False
    if obstacle:
        raise ConfigError(f"--batch-invariant: {obstacle}, or omit --batch-invariant")
    linear = tiles.tile(model)
    if wanted is None and any(not sizes.allowed.issuperset(tiles.SMALL) for sizes in linear):
        remove(model)  # some small steps would have to be padded to larger ones
        return False
    return True


def holds(model: Model) -> bool:
    """True if a sequence's logits are the same alone, one token per step, and with others."""
    cache, info = model.cache, model.info
    length = min(_TRIAL_LENGTH, info.context_length)
    if length < 2 * _ALONE:
        return True
    ids = [(5 * i * i + 11 * i + 1) % min(info.vocab_size, 241) for i in range(length)]
    cut = length - _ALONE
    with cache.borrowed(2) as slots:
        alone = model.forward([Step(slots[0], 0, ids[:cut])])
        for at in range(cut, length):
            alone += model.forward([Step(slots[0], at, ids[at : at + 1])])
        for at, others in ((0, 1), (cut // 3, 17), (cut, 7), (cut // 2, 33)):
            if at:
                model.forward([Step(slots[-1], 0, ids[:at], 0)])
            others = min(others, length) if len(slots) > 1 else 0
            company = [Step(slots[0], 0, ids[::-1][:others])] if others else []
            rows = min(_ALONE + 1, length - at)
            *_, together = model.forward([*company, Step(slots[-1], at, ids[at:], rows)])
            if not torch.equal(torch.cat([row.logits for row in alone])[-rows:], together.logits):
                return False
        return True
