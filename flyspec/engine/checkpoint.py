"""A checkpoint: its files, and the size of its weights according to their headers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Converted to the data type that the model runs in; others stay as they are."""


class Checkpoint(NamedTuple):
    """A model to be loaded, and how.

    `weights` is a safetensors file, or the index of several. `tensor_parallel_size` devices share
    the model.
    """

    name: str
    config: Any
    dtype: torch.dtype
    device: torch.device
    context_length: int
    tensor_parallel_size: int
    weights: Path

    def files(self) -> list[Path]:
        """Return the safetensors files by name; those of a hub may not be downloaded yet.

        Raises `OSError` and `ValueError` for an index that cannot be read.
        """
        if self.weights.suffix != ".json":
            return [self.weights]
        index = json.loads(self.weights.read_text())
        return [self.weights.parent / name for name in sorted(set(index["weight_map"].values()))]

    def loaded_bytes(self) -> int | None:
        """Return the bytes of all weights once they are loaded; None if unknown.

        If files are not downloaded yet, the size is computed from the index.
        """
        try:
            files = self.files()
            if all(file.is_file() for file in files):
                return sum(_of_file(file, self.dtype) for file in files)
            index = json.loads(self.weights.read_text())
            stored = getattr(self.config, "dtype", None)
            stored = stored if isinstance(stored, torch.dtype) else torch.float32
            return int(index["metadata"]["total_size"]) * self.dtype.itemsize // stored.itemsize
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # loading reports what is wrong


def _of_file(path: Path, dtype: torch.dtype) -> int:
    """Loaded bytes of a file, from its header: 8 bytes of length (little-endian), then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path}: header too large: {length} bytes")
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        floats = tensor["dtype"] in _FLOATS
        total += prod(tensor["shape"]) * dtype.itemsize if floats else end - begin
    return total
