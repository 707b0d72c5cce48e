"""Keyed sampling of rows on a CPU by the compiled step: the tokens of `engine.sampling`, sooner."""

from __future__ import annotations

import torch
from torch import Tensor

from flyspec.engine.native.library import find


def sample_rows(processed: Tensor, keys: Tensor) -> Tensor | None:
    """Draw a token per row of processed logits [rows, V] with its key, int64 [rows].

    A row whose largest logit is not finite yields -1. Returns None if this is not to be had: not
    on a CPU, not in float32, or not compiled.
    """
    if processed.device.type != "cpu" or processed.dtype != torch.float32:
        return None
    library = find()
    if isinstance(library, str):
        return None
    rows, drawn = processed.contiguous(), torch.empty(len(processed), dtype=torch.int64)
    library.functions.flyspec_sample(
        rows.data_ptr(), *rows.shape, keys.data_ptr(), drawn.data_ptr()
    )
    return drawn
