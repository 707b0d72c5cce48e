"""The attention function that transformers' layers call, in place of their own.

Registered with transformers' `AttentionInterface` as "flyspec"; no mask function has that name, so
transformers builds no masks. What each row may read is in the `StepAttention`, which travels
through the model's forward as the keyword argument `layout`.
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
    """Make "flyspec" known to transformers."""
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
    """Attention of `query` [1, heads, T, dim]; keys and values are in the layout's cache already.

    The signature is that of transformers' attention functions. Raises `NotImplementedError` if the
    model asks for another kind of attention.
    """
    if layout is None:
        raise NotImplementedError("it passes no arguments on to its attention")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = layout.backend.cache.slot_layers[index]
    _check_call(module, attention_mask, kwargs)
    if layer.keys is None or layer.keys.shape[2:] != (key.shape[1], key.shape[3]):
        raise NotImplementedError(
            "its cached keys are not those of its attention, as in multi-head latent attention"
        )
    layout.backend.windows[index] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = Attending(scale, sliding_window, softcap)
    return layout.attend(query[0], layer, how)[None], None


def _check_call(
    module: torch.nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, Any]
) -> None:
    """Refuse what a layer asks of its attention and ours does not do.

    `arguments` are those that it does not know. Raises `NotImplementedError`.
    """
    if attention_mask is not None:
        raise NotImplementedError("it makes attention masks of its own")
    if arguments.get("s_aux") is not None:
        raise NotImplementedError("its attention has sinks")
    if arguments.get("position_bias") is not None:
        raise NotImplementedError("its attention adds a bias for positions")
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("its attention is bidirectional")
