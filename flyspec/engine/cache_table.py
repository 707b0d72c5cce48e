"""Interface of a KV cache's table, whatever its memory looks like: `slots` or `pages`.

A slot is the handle of a sequence. A step names it, and how many of its tokens to keep; the forward
writes after them, wherever each sequence is. So a rollback is a length. A prefix that is in the
cache is not computed again. Tables are owned by the thread that runs the model. No torch, no numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

MemoryRows: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""Rows of the cache's memory, a position's keys and values each."""
SPARE_ROWS = 512
"""Positions after the last slot: fixed-shape attention reads, masked, beyond a slot's end."""


class Lease(NamedTuple):
    """A slot, and how many tokens of the requested sequence it already holds."""

    slot: int
    length: int


class Claim(NamedTuple):
    """A step will overwrite `num_tokens` positions of `slot` after its first `start`."""

    slot: int
    start: int
    num_tokens: int


ZEROS = -1


class Copy(NamedTuple):
    """Copy the first `length` tokens of `source` to `target`, which are slots or blocks.

    A source of `ZEROS` clears them.
    """

    source: int
    target: int
    length: int


class RowCopy(NamedTuple):
    """Copy rows of memory, in this order: `sources` to `targets`, as `CacheTable.rows` counts."""

    sources: Sequence[int]
    targets: Sequence[int]


class BlockChange(NamedTuple):
    """Entry `index` of the block table's row `slot` is `block` now."""

    slot: int
    index: int  # type: ignore[assignment]  # not tuple's method
    block: int


class Moves(NamedTuple):
    """Work due before the next step: copies in memory, in order, and in mirrored tables."""

    copies: Sequence[Copy | RowCopy] = ()
    changes: Sequence[BlockChange] = ()


class CacheTable(ABC):
    """Hands out slots and tracks their contents.

    `queries` and `hits` count the tokens passed to `acquire` and those found in the cache (vLLM's
    `prefix_cache_queries` and `prefix_cache_hits`), `preemptions` the sequences that lost their
    contents to older ones. Without `reuse`, nothing is looked up. `pending_copies` must be carried
    out in order before the next step; `take_moves` returns them too.
    """

    block_size = num_blocks = 0
    """Tokens per block, and blocks that sequences may use; both 0 in a table without blocks."""
    _token_ids: np.ndarray[Any, np.dtype[np.int32]]
    """[num_slots, max_length]: what each slot held last, valid or not."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        self.reuse = True
        self.queries = self.hits = self.preemptions = 0
        self.pending_copies: list[Copy | RowCopy] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence refers to, findable or not."""
        return 0

    @property
    def usage(self) -> float:
        """Share of the blocks, or without blocks of the slots, that sequences hold: 0 to 1."""
        if self.num_blocks:
            return 1 - self.num_free_blocks / self.num_blocks
        return 1 - self.num_free / self.num_slots

    @contextmanager
    def borrowed(self, count: int = 1) -> Iterator[list[int]]:
        """Lend slots for a trial, as many of `count` as are free; the cache is empty after it."""
        slots = [self.acquire().slot for _ in range(min(count, self.num_free))]
        try:
            yield slots
        finally:
            for slot in slots:
                self.release(slot)
            self.forget()

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that no sequence has."""

    @abstractmethod
    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        Raises `ResourceExhaustedError` if no slot is free.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Return a slot; its contents stay until their memory is needed."""

    @abstractmethod
    def forget(self, slot: int | None = None) -> None:
        """Drop the contents of `slot`, or of all slots, so that they are not reused."""

    @abstractmethod
    def reserve(self, slot: int, start: int, count: int) -> None:
        """Note that `count` positions of `slot` after its first `start` will be overwritten.

        Contents from `start` on are lost even if the forward fails. Raises `ValueError` past the
        slot's end, and `ResourceExhaustedError` without memory, which `make_room` prevents.
        """

    @abstractmethod
    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Note that `slot` holds `token_ids` after its first `start` tokens, and nothing else."""

    def keep_path(self, slot: int, start: int, path: Sequence[int], ids: Sequence[int]) -> None:
        """Keep of a tree that `slot` was just given after its first `start` tokens only a path.

        `path` has the indices of its tokens in the tree, ascending, and `ids` these tokens.
        """
        moved = [i for i, index in enumerate(path) if index != i]
        if moved:
            rows = self.rows(slot, start, path[-1] + 1).tolist()
            copy = RowCopy([rows[path[i]] for i in moved], [rows[i] for i in moved])
            self.pending_copies.append(copy)
        self.record(slot, start, ids)

    @abstractmethod
    def length(self, slot: int) -> int:
        """Return how many tokens of `slot` are valid: a step may start there or before."""

    def held(self, slot: int, start: int = 0) -> list[int]:
        """Return the valid token ids of `slot` from `start` to its `length`."""
        return self._between(slot, start, self.length(slot))

    def lost(self, slot: int, end: int) -> list[int]:
        """Return the token ids of `slot` that it held before, from its `length` to `end`."""
        return self._between(slot, self.length(slot), end)

    def _between(self, slot: int, start: int, end: int) -> list[int]:
        token_ids: list[int] = self._token_ids[slot, start:end].tolist()
        return token_ids

    @abstractmethod
    def rows(self, slot: int, start: int, count: int) -> MemoryRows:
        """Return the memory rows [count] of reserved positions from `start` on."""

    def make_room(self, claims: Sequence[Claim]) -> list[bool]:
        """Return which claims of different slots, of one step, have memory; others must wait."""
        return [True] * len(claims)

    def blocks_to_open(self, num_tokens: int) -> int:
        """Return the free blocks with which a sequence that begins with so many tokens may open."""
        return 0

    def take_moves(self) -> Moves:
        """Return what is pending since the last call; the caller must carry it out."""
        copies = [*self.pending_copies]
        self.pending_copies.clear()
        return Moves(copies)

    def apply_changes(self, changes: Sequence[BlockChange]) -> None:
        """Repeat another table's changes. A table that does so needs no `reserve` or `record`."""
        assert not changes, "this table has no blocks"
