"""A cache table of contiguous slots, each as long as the whole context.

A released slot keeps its contents until it is needed: a sequence with the same beginning starts
from them, or from a copy of a busy slot's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flyspec.engine.cache_table import CacheTable, Copy, Lease, MemoryRows
from flyspec.errors import ResourceExhaustedError

MIN_REUSE = 16
"""Minimum tokens of a prefix to reuse: a shorter one costs about as much to copy as to compute."""


class SlotTable(CacheTable):
    """Tracks which slot holds which sequence. Memory rows are counted across all slots."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(num_slots, max_length)
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)
        # Free slots, least recently used first; the length of what each slot holds, free or not.
        self._free = list(range(num_slots))
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        Prefers the free slot with the longest common prefix, if that is all of `token_ids` or at
        least half of what the slot holds, over the least recently used one. A longer prefix in
        another slot is copied. Raises `ResourceExhaustedError` if no slot is free.
        """
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        common = self._common(token_ids)
        self.queries += len(token_ids)
        slot = max(self._free, key=lambda free: int(common[free]))
        # Keep a long sequence, which may be requested again, rather than reuse its short beginning;
        # but a prompt that is asked again replaces its last answer.
        enough = min(len(token_ids) - 1, int(self._lengths[slot]) // 2)
        if common[slot] < max(MIN_REUSE, enough):
            slot = self._free[0]
        donor, length = int(common.argmax()), int(common[slot])
        if common[donor] >= length + MIN_REUSE:
            length = int(common[donor])
            self.pending_copies.append(Copy(donor, slot, length))
            self._token_ids[slot, :length] = self._token_ids[donor, :length]
        self._free.remove(slot)
        self._lengths[slot] = length
        self.hits += length
        return Lease(slot, length)

    def release(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def forget(self, slot: int | None = None) -> None:
        self._lengths[slice(None) if slot is None else slot] = 0

    def reserve(self, slot: int, start: int, count: int) -> None:
        if start < 0 or start + count > self.max_length:
            raise ValueError(
                f"{count} tokens after the first {start} exceed a slot of {self.max_length}"
            )
        self._lengths[slot] = min(start, int(self._lengths[slot]))

    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        end = start + len(token_ids)
        self._token_ids[slot, start:end] = token_ids
        self._lengths[slot] = end

    def length(self, slot: int) -> int:
        return int(self._lengths[slot])

    def rows(self, slot: int, start: int, count: int) -> MemoryRows:
        first = slot * self.max_length + start
        return np.arange(first, first + count, dtype=np.int64)

    def _common(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Length of the prefix of `token_ids` that each slot begins with."""
        count = min(len(token_ids), self.max_length)
        if not self.reuse or count < MIN_REUSE:
            return np.zeros(self.num_slots, dtype=np.int64)
        differs = self._token_ids[:, :count] != np.asarray(token_ids[:count], dtype=np.int32)
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), count)
        return np.minimum(first, self._lengths)
