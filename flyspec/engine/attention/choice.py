"""Chooses the attention over blocks: what `--attention-backend` names, or the fastest there is."""

from __future__ import annotations

import logging
from typing import Any

import torch

from flyspec.engine import compiling
from flyspec.engine.attention import flashinfer
from flyspec.engine.attention.flashinfer import FlashInferAttention
from flyspec.engine.attention.flex import uncopied
from flyspec.engine.attention.paged import GatheredAttention, PagedAttention
from flyspec.engine.heads import layer_heads
from flyspec.engine.kv_memory import PagedCache
from flyspec.errors import ConfigError
from flyspec.flags import AttentionBackendName

log = logging.getLogger(__name__)


def choose_attention(
    name: AttentionBackendName, cache: PagedCache, model: Any
) -> PagedAttention | None:
    """Return the attention of this name over `cache`; None to attend by segments, as on a CPU.

    Raises `ConfigError` if it cannot serve the model.
    """
    device: torch.device = model.device
    if name == "auto" and device.type == "cpu":
        return None
    if name == "sdpa":
        return GatheredAttention(cache)
    if name == "flex":
        if device.type != "cpu" and (refused := compiling.refusal()):
            raise ConfigError(
                f"--attention-backend flex: would have to be compiled: {refused}; or use auto, sdpa"
            )
        return uncopied(cache, device)
    _, _, head_size = next(layer_heads(model.config.get_text_config()))
    reason = flashinfer.unavailable(device, model.dtype, head_size)
    if reason is None:
        return FlashInferAttention(cache, device)
    if name == "flashinfer":
        raise ConfigError(f"--attention-backend flashinfer: {reason}; use auto, flex or sdpa")
    log.info("attention without FlashInfer: %s", reason)
    return uncopied(cache, device)
