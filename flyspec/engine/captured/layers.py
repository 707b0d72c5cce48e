"""Compiles a model's decoder layers, which fuses their small operations.

In a graph of eager operations, an 8B model would spend a third of a step in norms, rotations and
additions. Each layer is compiled by itself: all are alike, so one compilation serves them, and
attention and the cache's writes stay outside of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from flyspec.engine.attention import hook
from flyspec.engine.compiling import allow_many_shapes
from flyspec.engine.kv_memory import KVCache

_UNCOMPILED = f"{hook.NAME}_uncompiled"


@lru_cache(maxsize=1)
def _prepare() -> None:
    """Register attention that is not compiled, once: layers are compiled for what they call."""
    allow_many_shapes()
    # Else a layer's index is a constant to compile for, and torch gives up after 8 layers.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    AttentionInterface.register(_UNCOMPILED, torch.compiler.disable(hook.forward))


def compile_layers(model: Any, cache: KVCache) -> int:
    """Compile the layers in place, each when it first runs; return their number.

    transformers' decoder layers are `GradientCheckpointingLayer`s; a model without any stays as it
    is.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if layers:
        _prepare()
        model.set_attn_implementation(_UNCOMPILED)
        cache.update = torch.compiler.disable(cache.update)  # type: ignore[method-assign]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
