"""Tracks which slot holds which sequence: a rollback is a length, and a prefix is computed once.

A slot holds one sequence. A step names the slot and how many of its tokens to keep; the forward
writes after them, wherever each slot is. A released slot keeps its contents until it is needed: a
sequence with the same beginning starts from them, or from a copy of a busy slot's. The contents
themselves are up to the model (`slot_cache`); nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flyspec.errors import ResourceExhaustedError

MIN_REUSE = 16
"""Minimum tokens of a prefix to reuse: a shorter one costs about as much to copy as to compute."""


class Lease(NamedTuple):
    """A slot, and how many tokens of the requested sequence it already holds."""

    slot: int
    length: int


class Copy(NamedTuple):
    """Copy the first `length` tokens of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


class SlotTable:
    """Hands out slots and tracks their contents. Owned by the thread that runs the model.

    `queries` and `hits` count the tokens passed to `acquire` and those found in the cache (vLLM's
    `prefix_cache_queries` and `prefix_cache_hits`). `pending_copies` must be carried out in order
    before the next step.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        self.reuse = True
        self.queries = self.hits = 0
        self.pending_copies: list[Copy] = []
        # Free slots, least recently used first; the contents of each slot, free or not.
        self._free = list(range(num_slots))
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        Prefers the free slot with the longest common prefix, if that is at least half of what the
        slot holds, over the least recently used one. A longer prefix in another slot is copied.
        Raises `ResourceExhaustedError` if no slot is free.
        """
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        common = self._common(token_ids)
        self.queries += len(token_ids)
        slot = max(self._free, key=lambda free: int(common[free]))
        # Keep a long sequence, which may be requested again, rather than reuse its short beginning.
        if common[slot] < max(MIN_REUSE, int(self._lengths[slot]) // 2):
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
        """Return a slot; its contents stay until the slot is needed."""
        assert slot not in self._free
        self._free.append(slot)

    def forget(self, slot: int | None = None) -> None:
        """Drop the contents of `slot`, or of all slots, so that they are not reused."""
        self._lengths[slice(None) if slot is None else slot] = 0

    def reserve(self, slot: int, start: int, count: int) -> None:
        """Note that `count` positions of `slot` after its first `start` will be overwritten.

        Their contents are lost even if the forward fails. Raises `ValueError` past the slot's end.
        """
        if start < 0 or start + count > self.max_length:
            raise ValueError(
                f"{count} tokens after the first {start} exceed a slot of {self.max_length}"
            )
        self._lengths[slot] = min(start, int(self._lengths[slot]))

    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Note that `slot` holds `token_ids` after its first `start` tokens, and nothing else."""
        end = start + len(token_ids)
        self._token_ids[slot, start:end] = token_ids
        self._lengths[slot] = end

    def held(self, slot: int) -> list[int]:
        """Return the token ids whose keys and values in `slot` may be reused."""
        held: list[int] = self._token_ids[slot, : self._lengths[slot]].tolist()
        return held

    def _common(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Length of the prefix of `token_ids` that each slot begins with."""
        count = min(len(token_ids), self.max_length)
        if not self.reuse or count < MIN_REUSE:
            return np.zeros(self.num_slots, dtype=np.int64)
        differs = self._token_ids[:, :count] != np.asarray(token_ids[:count], dtype=np.int32)
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), count)
        return np.minimum(first, self._lengths)
