"""A cache table of pages: sequences in blocks of a fixed number of tokens, shared where equal.

A slot is a row of the block table, and takes memory only for what it holds (vLLM's PagedAttention;
Kwon et al. 2023). A block that others refer to is copied before it is written. Where blocks run
short, the youngest sequence loses its contents and is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from flyspec.engine.block_pool import BlockPool, Content
from flyspec.engine.cache_table import (
    ZEROS,
    BlockChange,
    CacheTable,
    Claim,
    Copy,
    Lease,
    MemoryRows,
    Moves,
)
from flyspec.errors import ResourceExhaustedError


@dataclass(slots=True)
class _Row:
    """A slot: its blocks, the ids of the contents of its leading full ones, and its valid tokens.

    Blocks beyond its length are kept for tokens to come. `age` orders slots by their last acquire.
    """

    blocks: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    length: int = 0
    age: int = 0


class PageTable(CacheTable):
    """Tracks which blocks hold which sequence.

    `blocks` [num_slots, blocks of the whole context] is the block table, int32, with 0 where there
    is none. Blocks 1 to `num_blocks` of memory are handed out; block 0 is for rows that only pad a
    step. Raises `ValueError` if not one whole context fits.
    """

    def __init__(self, num_slots: int, max_length: int, num_blocks: int, block_size: int) -> None:
        super().__init__(num_slots, max_length)
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)
        width = -(-max_length // block_size)
        if num_blocks < width:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: the context of "
                             f"{max_length} needs {width}")  # fmt: skip
        self.num_blocks, self.block_size = num_blocks, block_size
        self.blocks = np.zeros((num_slots, width), dtype=np.int32)
        self._pool = BlockPool(num_blocks)
        self._rows = [_Row() for _ in range(num_slots)]
        self._free = list(range(num_slots))
        self._acquired = 0
        self._changes: dict[tuple[int, int], int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        It refers to the longest chain of full blocks that hold the same from the start, of running
        sequences or of earlier ones. Raises `ResourceExhaustedError` if no slot is free.
        """
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        slot = self._free.pop(0)
        self._clear(slot)
        self._acquired += 1
        row = self._rows[slot]
        row.age = self._acquired
        self.queries += len(token_ids)
        if self.reuse:
            self._share(slot, token_ids)
        self.hits += row.length
        return Lease(slot, row.length)

    def release(self, slot: int) -> None:
        """Return a slot; its full blocks are findable until they are needed, the last one first."""
        assert slot not in self._free
        self._clear(slot)
        self._free.append(slot)

    def forget(self, slot: int | None = None) -> None:
        for each in range(self.num_slots) if slot is None else (slot,):
            for block in self._rows[each].blocks:
                self._pool.hide(block)
                if slot is not None and not self._pool.is_shared(block):
                    # A step may have failed for NaN, which no mask hides from the next sequence.
                    self.pending_copies.append(Copy(ZEROS, block, self.block_size))
            self._clear(each)
        if slot is None:
            self._pool.hide_all()

    def reserve(self, slot: int, start: int, count: int) -> None:
        """Give `slot` blocks of its own for `count` positions after its first `start`.

        A shared block is replaced by a copy of what is kept of it. Raises as `CacheTable.reserve`.
        """
        if start < 0 or start + count > self.max_length:
            raise ValueError(
                f"{count} tokens after the first {start} exceed a slot of {self.max_length}"
            )
        row, size, pool = self._rows[slot], self.block_size, self._pool
        row.length = min(start, row.length)
        first = start // size
        del row.contents[first:]
        for index in range(min(first, len(row.blocks)), self._num_blocks(start + count)):
            if index >= len(row.blocks):
                self._set(slot, index, pool.allocate())
                continue
            block = row.blocks[index]
            if not pool.is_shared(block):
                pool.hide(block)
                continue
            own, kept = pool.allocate(), start - index * size
            if kept > 0:
                self.pending_copies.append(Copy(block, own, kept))
            self._set(slot, index, own)
            pool.free(block)

    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Note what `slot` holds after its first `start` tokens; full blocks become findable."""
        row, size = self._rows[slot], self.block_size
        row.length = end = start + len(token_ids)
        self._token_ids[slot, start:end] = token_ids
        for index in range(len(row.contents), end // size):
            parent = row.contents[-1] if index else 0
            ids = self._token_ids[slot, index * size : (index + 1) * size].tobytes()
            row.contents.append(self._pool.publish(row.blocks[index], Content(parent, ids)))

    def length(self, slot: int) -> int:
        return self._rows[slot].length

    def rows(self, slot: int, start: int, count: int) -> MemoryRows:
        positions = np.arange(start, start + count, dtype=np.int64)
        blocks = self.blocks[slot, positions // self.block_size].astype(np.int64)
        rows: MemoryRows = blocks * self.block_size + positions % self.block_size
        return rows

    # --- where blocks run short -------------------------------------------------------------

    def make_room(self, claims: Sequence[Claim]) -> list[bool]:
        """Reserve what the claims of different slots need, the oldest slot's first.

        A claim gets free blocks, then those that other slots have beyond their lengths, then those
        of younger slots, the youngest first, which lose their contents; the oldest claim also those
        of older slots without a claim, so it always has room. A claim for which all of them would
        not do takes none. Returns which claims have room; those of slots that lost their contents
        have not. What exceeds a slot is left for `reserve`.
        """
        in_order = sorted(claims, key=lambda claim: self._rows[claim.slot].age)
        granted: dict[int, Claim] = {}
        preempted: set[int] = set()
        for slot, start, count in in_order:
            if slot in preempted:
                continue
            start = min(start, self.max_length)
            granted[slot] = claim = Claim(slot, start, min(count, self.max_length - start))
            if self._missing(claim) > self.num_free_blocks:
                self._drop_surplus(granted)
            if self._missing(claim) > self.num_free_blocks:
                rivals = self._rivals(slot, any_age=slot == in_order[0].slot)
                if not self._fits(claim, rivals):
                    del granted[slot]
                    continue
                while self._missing(claim) > self.num_free_blocks:
                    preempted.add(rival := rivals.pop())
                    self._clear(rival)
                    self.preemptions += 1
            self.reserve(*claim)
        return [claim.slot in granted for claim in claims]

    def blocks_to_open(self, num_tokens: int) -> int:
        """Return the blocks of the tokens and one more, at most those of the whole context."""
        return min(self._num_blocks(num_tokens) + 1, self.blocks.shape[1])

    def take_moves(self) -> Moves:
        changes = [BlockChange(*entry, block) for entry, block in self._changes.items()]
        self._changes.clear()
        return super().take_moves()._replace(changes=changes)

    def apply_changes(self, changes: Sequence[BlockChange]) -> None:
        for slot, index, block in changes:
            self.blocks[slot, index] = block

    def _rivals(self, slot: int, any_age: bool) -> list[int]:
        """Slots that `slot` may take blocks from, the youngest last."""
        rows, age = self._rows, self._rows[slot].age
        rivals = [
            other
            for other, row in enumerate(rows)
            if other != slot and row.blocks and (any_age or row.age > age)
        ]
        return sorted(rivals, key=lambda other: rows[other].age)

    def _missing(self, claim: Claim) -> int:
        """Blocks that `reserve` would take for a claim."""
        blocks, end = (
            self._rows[claim.slot].blocks,
            self._num_blocks(claim.start + claim.num_tokens),
        )
        shared = sum(map(self._pool.is_shared, blocks[claim.start // self.block_size : end]))
        return shared + max(0, end - len(blocks))

    def _fits(self, claim: Claim, rivals: Sequence[int]) -> bool:
        """True if a claim would have room without these slots: else they lose nothing for it."""
        others = (row.blocks for slot, row in enumerate(self._rows) if slot not in rivals)
        kept = Counter(chain.from_iterable(others))
        blocks = self._rows[claim.slot].blocks
        end = self._num_blocks(claim.start + claim.num_tokens)
        shared = sum(kept[block] > 1 for block in blocks[claim.start // self.block_size : end])
        return shared + max(0, end - len(blocks)) <= self.num_blocks - len(kept)

    def _drop_surplus(self, claims: dict[int, Claim]) -> None:
        """Drop all blocks beyond the lengths of slots and claims."""
        for slot, row in enumerate(self._rows):
            claim = claims.get(slot)
            kept = self._num_blocks(max(row.length, claim.start + claim.num_tokens if claim else 0))
            self._drop(slot, kept)

    # --- blocks of a slot -------------------------------------------------------------------

    def _share(self, slot: int, token_ids: Sequence[int]) -> None:
        """Refer to the blocks that hold the beginning of `token_ids`."""
        row, size = self._rows[slot], self.block_size
        held = np.asarray(token_ids[: self.max_length], dtype=np.int32)
        parent = 0
        for index in range(len(held) // size):
            ids = held[index * size : (index + 1) * size].tobytes()
            block, parent = self._pool.find(Content(parent, ids))
            if not block:
                break
            self._set(slot, index, block)
            row.contents.append(parent)
        row.length = len(row.blocks) * size
        self._token_ids[slot, : row.length] = held[: row.length]

    def _clear(self, slot: int) -> None:
        row = self._rows[slot]
        row.length = 0
        row.contents.clear()
        self._drop(slot, 0)

    def _drop(self, slot: int, kept: int) -> None:
        """Free a slot's blocks after its first `kept`, the last one first."""
        blocks = self._rows[slot].blocks
        while len(blocks) > kept:
            self._pool.free(blocks.pop())
            self._note(slot, len(blocks), 0)

    def _set(self, slot: int, index: int, block: int) -> None:
        self._rows[slot].blocks[index : index + 1] = [block]
        self._note(slot, index, block)

    def _note(self, slot: int, index: int, block: int) -> None:
        self.blocks[slot, index] = block
        self._changes[slot, index] = block

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
