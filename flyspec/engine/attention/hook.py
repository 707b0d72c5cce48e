"""The attention function that transformers' layers call instead of their own.

Registered with transformers' `AttentionInterface` as "flyspec"; no mask function has that name, so
transformers builds no masks. The `StepAttention`, passed through the model's forward as the keyword
argument `layout`, determines what each row may read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from flyspec.engine.attention.base import Attending, StepAttention

NAME = "flyspec"


@lru_cache(maxsize=1)
def register() -> None:
    AttentionInterface.register(NAME, forward)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: StepAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with `query` [1, heads, T, dim]; keys and values are already in the layout's cache.

    The signature is that of transformers' attention functions. Raises `NotImplementedError` if the
    model needs another kind of attention.
    """
    if layout is None:
        raise NotImplementedError("it does not pass arguments on to its attention")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = layout.backend.cache.kv_layers[index]
    _check_call(module, attention_mask, kwargs)
    if layer.keys is None or layer.keys.shape[2:] != (key.shape[1], key.shape[3]):
        raise NotImplementedError(
            "the keys it caches are not those it attends to, as in multi-head latent attention"
        )
    layout.backend.windows[index] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = Attending(scale, sliding_window, softcap)
    return layout.attend(query[0], layer, how)[None], None


def _check_call(
    module: torch.nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, Any]
) -> None:
    """Reject what a layer requires of its attention and ours does not implement.

    `arguments` are those that `forward` does not name. Raises `NotImplementedError`.
    """
    if attention_mask is not None:
        raise NotImplementedError("it builds its own attention masks")
    if arguments.get("s_aux") is not None:
        raise NotImplementedError("its attention uses sinks")
    if arguments.get("position_bias") is not None:
        raise NotImplementedError("its attention adds a position bias")
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("its attention is bidirectional")
