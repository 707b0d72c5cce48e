"""Zeros that a CPU's memory is taken for as they are written, page by page.

`torch.zeros` writes them itself, so that all of it is taken at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


def allocate(num_bytes: int, large_pages: bool = True) -> mmap.mmap:
    """Zeros at the start of a page, taken from the machine as they are touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU in memory that is taken page by page; on other devices all at once.

    Raises what the allocator raises: `OSError` on a CPU.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = allocate(prod(shape) * dtype.itemsize, large_pages=False)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
