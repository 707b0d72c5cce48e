"""A checkpoint: its files, and how large its weights are, from their headers alone."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

_MOST_HEADER_BYTES = 100_000_000
"""As safetensors has it."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Loaded in the data type that the model runs in; others stay as they are."""


class Checkpoint(NamedTuple):
    """A model that is about to be loaded, and how.

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
        """The safetensors files, by name; those of a hub may not be here yet.

        Raises `OSError` and `ValueError` for an index that cannot be read.
        """
        if self.weights.suffix != ".json":
            return [self.weights]
        index = json.loads(self.weights.read_text())
        return [self.weights.parent / name for name in sorted(set(index["weight_map"].values()))]

    def loaded_bytes(self) -> int | None:
        """Bytes of all its weights once they are loaded; None if they cannot be told.

        Files that are not here yet are counted from the size that the index names.
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
            return None  # whoever loads it says what is wrong with it


def _of_file(path: Path, dtype: torch.dtype) -> int:
    """A header is its length in 8 bytes, the least first, and JSON: dtype, shape, place of each."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path}: a header of {length} bytes")
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        floats = tensor["dtype"] in _FLOATS
        total += prod(tensor["shape"]) * dtype.itemsize if floats else end - begin
    return total
