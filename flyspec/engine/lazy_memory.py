"""Zeros whose CPU memory is taken page by page as they are written.

`torch.zeros` writes them itself, which takes all of the memory at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


def allocate(num_bytes: int, large_pages: bool = True) -> mmap.mmap:
    """Return page-aligned zeros whose memory is taken as they are touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, on a CPU in memory that is taken page by page, elsewhere all at once.

    Raises what the allocator raises: `OSError` on a CPU.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = allocate(prod(shape) * dtype.itemsize, large_pages=False)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
