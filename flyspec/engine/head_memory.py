"""Device memory of draft heads, from their files' headers. No torch.

Heads are loaded once the target's KV cache is there, so that it must leave them room: for their
weights, for the hidden rows that they read, and for their own caches, which grow with the sequences
as the KV cache does (`draft_heads.stepping`).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from flyspec.config import ModelServerSettings
from flyspec.drafter_names import head_directories
from flyspec.engine.checkpoint import loaded_sizes
from flyspec.engine.devices import AnyDevice, ElementType
from flyspec.engine.heads import layer_heads
from flyspec.model_files import CONFIG, SAFETENSORS

_MTP_LAYER = re.compile(r"(?:model\.layers\.(\d+)|mtp)\.")
"""Tensors of a target's checkpoint that may be an MTP layer's; a decoder layer with its number."""


class HeadMemory(NamedTuple):
    """Bytes of all heads of a target: weights, hidden rows of the largest step, and what their
    caches take per token of a session."""

    weights: int = 0
    hidden: int = 0
    bytes_per_token: int = 0

    @property
    def taken(self) -> dict[str, int]:
        """Memory that they take whatever the KV cache's size, by name."""
        parts = {"heads": self.weights, "hidden rows": self.hidden}
        return {name: size for name, size in parts.items() if size}


def head_memory(
    settings: ModelServerSettings,
    config: Any,
    dtype: ElementType,
    device: AnyDevice,
    context_length: int,
) -> HeadMemory:
    """Return what the heads of `--heads` will take beside a target of this configuration.

    An estimate, in the target's data type. A head whose files cannot be read counts as nothing:
    loading it says what is wrong.
    """
    directories = head_directories(getattr(settings, "heads", ""))
    if not directories:
        return HeadMemory()
    text = config.get_text_config()
    weights = numbers = 0
    for directory in directories.values():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            own, cached = _of_head(Path(directory).expanduser(), text, dtype)
            weights, numbers = weights + own, numbers + cached
    hidden = 0
    if device.type == "cuda":  # all layers' rows are kept until the heads have read them
        tokens = min(settings.max_num_batched_tokens, context_length)
        hidden = tokens * (text.num_hidden_layers + 1) * text.hidden_size * dtype.itemsize
    return HeadMemory(weights, hidden, numbers * dtype.itemsize)


def _of_head(folder: Path, target: Any, dtype: ElementType) -> tuple[int, int]:
    """Return the bytes of a head's weights, and how many numbers it caches per token."""
    config = json.loads((folder / CONFIG).read_text())
    files = sorted(folder.glob(f"*{SAFETENSORS}"))
    sizes = [(_MTP_LAYER.match(name), n) for path in files for name, n in loaded_sizes(path, dtype)]
    mtp = [n for m, n in sizes if m and (m[1] is None or int(m[1]) >= target.num_hidden_layers)]
    if mtp:  # a layer of the target's kind
        *_, (_, kv_heads, dim) = layer_heads(target)
        return sum(mtp), 2 * kv_heads * dim
    weights = sum(n for _, n in sizes)
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return weights, 0
    layer = SimpleNamespace(**config.get("transformer_layer_config", config))
    return weights, sum(2 * kv_heads * dim for _, kv_heads, dim in layer_heads(layer))
