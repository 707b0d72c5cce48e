"""Limits of torch's compiler that steps of many shapes would exceed."""

from __future__ import annotations

import torch

SHAPES = 256
"""Shapes that a function may be compiled for. Beyond torch's own limit, 8, it would run eagerly."""


def allow_many_shapes() -> None:
    limits = torch._dynamo.config
    limits.recompile_limit = max(SHAPES, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(SHAPES, limits.accumulated_recompile_limit)
