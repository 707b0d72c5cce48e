"""Which slot holds which sequence: a rollback is a length and a prefix is paid for once.

A slot holds one sequence. A step names the slot and how many of its tokens to keep; the forward
writes behind them, wherever each slot is. A released slot keeps its contents until the slot is
needed: a sequence that begins alike starts from them, or from a copy of a busy slot's. The contents
themselves are a model's business (`slot_cache`); nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flyspec.errors import ResourceExhaustedError

MIN_REUSE = 16
"""Shorter common prefixes are computed again: a copy costs about as much."""


class Lease(NamedTuple):
    """A slot, and how many tokens of the sequence it was asked for it holds already."""

    slot: int
    length: int


class Copy(NamedTuple):
    """The first `length` tokens of slot `source` become those of slot `target`."""

    source: int
    target: int
    length: int


class SlotTable:
    """Hands out slots, and knows what they hold. Owned by the thread that runs the model.

    `queries` and `hits` count tokens asked for by `acquire` and found (vLLM's
    `prefix_cache_queries` and `prefix_cache_hits`). `pending_copies` are to be carried out before
    the next step, in order.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        self.reuse = True
        self.queries = self.hits = 0
        self.pending_copies: list[Copy] = []
        # Free slots, the least recently used first; what each slot holds, free or not.
        self._free = list(range(num_slots))
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        The free slot that holds them, where that is most of what it holds; else the least recently
        used one, whose contents are given up for a copy of what another slot holds of them. Raises
        `ResourceExhaustedError` when none is free.
        """
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        common = self._common(token_ids)
        self.queries += len(token_ids)
        slot = max(self._free, key=lambda free: int(common[free]))
        # A short common beginning is not worth a long sequence that may be asked for again.
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
        """Give a slot back; what it holds stays until the slot is needed."""
        assert slot not in self._free
        self._free.append(slot)

    def forget(self, slot: int | None = None) -> None:
        """Reuse nothing of what the slots hold, or one of them."""
        self._lengths[slice(None) if slot is None else slot] = 0

    def reserve(self, slot: int, start: int, count: int) -> None:
        """Note that `count` positions of `slot` behind its first `start` are to be overwritten.

        What they held is gone even if the forward fails. Raises `ValueError` beyond the slot's end.
        """
        if start < 0 or start + count > self.max_length:
            raise ValueError(
                f"{count} tokens behind the first {start} exceed a slot of {self.max_length}"
            )
        self._lengths[slot] = min(start, int(self._lengths[slot]))

    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Note that `slot` holds `token_ids` behind its first `start` tokens, and nothing else."""
        end = start + len(token_ids)
        self._token_ids[slot, start:end] = token_ids
        self._lengths[slot] = end

    def held(self, slot: int) -> list[int]:
        """The token ids whose keys and values `slot` holds, as far as they may be reused."""
        held: list[int] = self._token_ids[slot, : self._lengths[slot]].tolist()
        return held

    def _common(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many of `token_ids` each slot begins with."""
        count = min(len(token_ids), self.max_length)
        if not self.reuse or count < MIN_REUSE:
            return np.zeros(self.num_slots, dtype=np.int64)
        differs = self._token_ids[:, :count] != np.asarray(token_ids[:count], dtype=np.int32)
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), count)
        return np.minimum(first, self._lengths)
