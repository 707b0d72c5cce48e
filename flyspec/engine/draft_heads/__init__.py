"""Draft heads: small networks beside the target that draft from its hidden rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyspec.engine.draft_heads.base import DraftHead
    from flyspec.engine.loading import LoadedModel
    from flyspec.flags import FlashAttention


def load_head(
    directory: Path, target: LoadedModel, num_slots: int, flash_attn: FlashAttention = "auto"
) -> DraftHead:
    """Load the head in a directory for a target with this many slots (`loading.load_head`)."""
    from flyspec.engine.draft_heads import loading

    return loading.load_head(directory, target, num_slots, flash_attn)
