"""Attention of a packed step in shapes that give a row the same bits, whatever else is in the step.

A segment runs in pieces of certain numbers of rows, over whole blocks of keys and a last block of
certain lengths; padding is masked or discarded. Pieces of the same shape in adjacent slots run in
one call, which changes no sum. A trial on this machine finds the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.attention.base import (
    KEY_BLOCK,
    MAX_FOLDED_ROWS,
    Attending,
    Segment,
    SegmentAttention,
    StepAttention,
    visible,
)
from flyspec.engine.batch_invariance.tiles import TILE, Sizes
from flyspec.engine.kv_memory import KVCache, KVLayer

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 17, 18, 20, 24, TILE, 64, 128)
"""Numbers of query rows to try."""
LAST_KEYS = tuple(range(32, KEY_BLOCK + 1, 32))
"""Numbers of keys in the last block to try."""

_MAX_ROWS = 128
_BATCH = 5


class Shapes(NamedTuple):
    """Numbers of query rows, and of keys in the last block, that give a row the same bits.

    `batched`: running several pieces in one call does too.
    """

    rows: Sizes
    keys: Sizes
    batched: bool

    def last_key(self, end: int) -> int:
        """Return the end of the keys read for a sequence of length `end`."""
        whole = (end - 1) // KEY_BLOCK * KEY_BLOCK
        return whole + (self.keys.fit(end - whole) or KEY_BLOCK)


@torch.inference_mode()
def attention_shapes(
    softcap: float | None, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> Shapes:
    """Return the numbers of rows and keys with the bits of `TILE` rows and whole blocks."""
    generator = torch.Generator().manual_seed(heads * dim)
    rows, last_keys, batched = set(ROWS), set(LAST_KEYS), True
    for base in (0, KEY_BLOCK):
        for last in LAST_KEYS:
            trial = _Trial(softcap, heads, kv_heads, dim, dtype, base + last, generator)
            expected = trial.run(0, TILE, 3 * KEY_BLOCK)
            if not torch.equal(trial.run(1, TILE, 3 * KEY_BLOCK)[:-1], expected[1:]):
                rows.clear()
            if not torch.equal(trial.run(0, TILE, base + last), expected):
                last_keys.discard(last)
                continue
            if last == KEY_BLOCK:
                tiles_ = [trial.run(f, TILE, base + last) for f in range(0, _MAX_ROWS, TILE)]
                expected = torch.cat(tiles_)
            for count in [c for c in rows if c <= len(expected)]:
                # Odd offsets too: a row's place in a piece must not matter either.
                for first in {0, min(1, len(expected) - count), len(expected) - count}:
                    got = trial.run(first, count, base + last)
                    if not torch.equal(got, expected[first : first + count]):
                        rows.discard(count)
                if count in rows and count <= MAX_FOLDED_ROWS:
                    batched &= trial.same_in_a_batch(count, base + last)
    # A single row per piece has one shape and one place, whatever the kernels do.
    return Shapes(Sizes(rows or {1}), Sizes(last_keys or {KEY_BLOCK}), batched and bool(rows))


class _Trial:
    """Attention whose sums are 0 except for rounding, so that any change of their order shows.

    Products of queries and keys cancel, and the scale magnifies what remains; keys come in pairs
    with opposite values. All queries read the first `length` - 5 keys.
    """

    def __init__(
        self,
        softcap: float | None,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        length: int,
        generator: torch.Generator,
    ) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self._how = Attending(2.0 ** (48 if dtype == torch.float64 else 20), softcap=softcap)
        self._group, self._length = heads // kv_heads, length - 5
        half = dim // 2
        self._query = random(heads, _MAX_ROWS, dim)
        self._query[..., half : 2 * half] = self._query[..., :half]
        keys, values = (random(1, kv_heads, 3 * KEY_BLOCK, dim) for _ in range(2))
        keys[..., half : 2 * half] = -keys[..., :half]
        values *= random(1, kv_heads, 3 * KEY_BLOCK, 1).exp()
        one, other = torch.randperm(self._length, generator=generator)[:-1].view(2, -1)
        keys[:, :, other], values[:, :, other] = keys[:, :, one], -values[:, :, one]
        # As in a slot: the heads of a position are adjacent.
        self._states = [s.transpose(1, 2).contiguous().transpose(1, 2) for s in (keys, values)]

    def same_in_a_batch(self, count: int, end: int) -> bool:
        """True if a piece of `count` rows has the same bits alone and repeated in one call."""
        mask = torch.zeros(_BATCH, 1, count * self._group, end, dtype=self._query.dtype)
        mask[..., self._length :] = -torch.inf
        keys, values = (s[:, :, :end].expand(_BATCH, -1, -1, -1) for s in self._states)
        query = self._query[:, :count].reshape(1, keys.shape[1], self._group * count, -1)
        alone = self._how.apply(query, keys[:1], values[:1], mask[:1])
        query = query.expand(_BATCH, -1, -1, -1).contiguous()
        return torch.equal(self._how.apply(query, keys, values, mask), alone.expand_as(query))

    def run(self, first: int, count: int, end: int) -> Tensor:
        """Attention of `count` queries from `first` on over keys up to `end`."""
        mask = torch.zeros(count, end, dtype=self._query.dtype)
        mask[:, self._length :] = -torch.inf
        if count <= MAX_FOLDED_ROWS:
            mask = mask.repeat(self._group, 1)
        keys, values = (s[:, :, :end] for s in self._states)
        query = self._query[:, first : first + count].contiguous()
        return self._how.attend(query, keys, values, mask)


CALL_COST = 128
"""Keys times rows that cost about as much as one more call."""


class _Call(NamedTuple):
    """Pieces of `size` rows each, in `slots` slots from `slot` on, over keys `first` to `end`."""

    slot: int
    slots: int
    size: int
    first: int
    end: int
    mask: Tensor


class _Plan(NamedTuple):
    """A layer's calls, over the places of all pieces, one after the other.

    `gather` selects from the packed rows' heads [T * heads] those in the places, each piece head by
    head; `scatter` [T * heads] is where their results are among those of all calls.
    """

    calls: list[_Call]
    gather: Tensor
    scatter: Tensor


class FixedShapeAttention(SegmentAttention):
    """Attention in shapes that are tried when a layer's heads and sizes are first seen."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.shapes = lru_cache(attention_shapes)

    def prepare(self, segments: Sequence[Segment]) -> StepAttention:
        return _FixedStep(self, segments)


class _FixedStep(StepAttention):
    """Plans a step's calls once for all layers that are alike."""

    def __init__(self, backend: FixedShapeAttention, segments: Sequence[Segment]) -> None:
        super().__init__(backend)
        self.segments = sorted(segments)  # by slot
        self._shapes = backend.shapes
        self._plans: dict[tuple[Attending, int, int, int], _Plan] = {}

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        heads, total, dim = query.shape
        kv_heads = layer.num_heads
        key = (how, heads, kv_heads, dim)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(how, query, kv_heads)
        # Every call's queries are a contiguous part of this: strides matter as shapes do.
        places = query.transpose(0, 1).reshape(total * heads, dim).index_select(0, plan.gather)
        queries = places.split([call.slots * call.size * heads for call in plan.calls])
        results = []
        for call, q in zip(plan.calls, queries, strict=True):
            keys, values = layer.read(call.slot, call.first, call.end, call.slots)
            if call.size <= MAX_FOLDED_ROWS:
                q = q.view(call.slots, kv_heads, heads // kv_heads * call.size, dim)
                result = how.apply(q, keys, values, call.mask)
            else:
                q = q.view(1, heads, call.size, dim)
                result = how.apply_grouped(q, keys, values, call.mask)
            # The layout of torch's kernel.
            results.append(result.transpose(1, 2).reshape(-1, result.shape[-1]))
        together = torch.cat(results).index_select(0, plan.scatter)
        return together.view(total, heads, -1)

    def _plan(self, how: Attending, query: Tensor, kv_heads: int) -> _Plan:
        """The calls of a layer, over all segments."""
        heads, total, dim = query.shape
        group = heads // kv_heads
        runs = self._runs(how, self._shapes(how.softcap, heads, kv_heads, dim, query.dtype))
        calls: list[_Call] = []
        gather = []
        scatter = torch.empty((total, heads), dtype=torch.int64)
        taken = 0
        for size, alike in runs.items():
            folded = size <= MAX_FOLDED_ROWS
            pieces = torch.tensor([p[1:4] for _, run in alike for p in run.pieces])
            starts, lengths, rows = pieces.T[:, :, None]
            places = torch.arange(size)
            packed = rows + torch.minimum(places, lengths - 1)
            gather.append(packed[:, None] * heads + torch.arange(heads)[:, None])
            # A piece's results are by (group, place, KV head) if folded, else by (place, head).
            inside = torch.arange(size * heads)
            if folded:
                inside = inside.view(group, size, kv_heads).permute(1, 2, 0).flatten()
            kept = places < lengths
            first = taken + torch.arange(len(pieces))[:, None, None] * (size * heads)
            scatter[packed[kept]] = (first + inside.view(size, heads))[kept]
            taken += len(pieces) * size * heads
            positions = (starts + places)[:, None]
            if folded:
                positions = positions.expand(-1, group, -1)
            calls += _calls(size, alike, how.window, positions.flatten(1), query)
        return _Plan(calls, torch.cat([g.flatten() for g in gather]), scatter.flatten())

    def _runs(self, how: Attending, shapes: Shapes) -> dict[int, list[tuple[int, _Run]]]:
        """The pieces of all segments by size, in runs, each with the first key it reads."""
        batched = shapes.batched and how.softcap is None
        runs: dict[int, list[tuple[int, _Run]]] = {}
        latest: dict[tuple[int, int], _Run] = {}
        for segment in self.segments:
            for piece, size, first, end in _pieces(segment, shapes, how):
                run = latest.get((size, first))
                if not (batched and run and run.take(piece, size, end)):
                    run = latest[size, first] = _Run([piece], end)
                    runs.setdefault(size, []).append((first, run))
        return runs


class _Run:
    """Pieces of one size in adjacent slots, read up to the same `end`."""

    def __init__(self, pieces: list[Segment], end: int) -> None:
        self.pieces, self.end = pieces, end

    def take(self, piece: Segment, size: int, end: int) -> bool:
        """Add the next slot's piece, unless reading further costs more than a call."""
        if piece.slot != self.pieces[-1].slot + 1 or size > MAX_FOLDED_ROWS:
            return False
        further = abs(end - self.end) * (len(self.pieces) if end > self.end else 1)
        if further * size > CALL_COST:
            return False
        self.pieces.append(piece)
        self.end = max(end, self.end)
        return True


def _pieces(
    segment: Segment, shapes: Shapes, how: Attending
) -> Iterator[tuple[Segment, int, int, int]]:
    """A segment's rows in pieces, each with its size and the range of keys that it reads."""
    start, row = segment.start, segment.row
    for size in shapes.rows.pieces(segment.length):
        count = min(size, segment.end - start)
        # Blocks begin at the same keys for all rows of the sequence.
        first = how.first_key(start) // KEY_BLOCK * KEY_BLOCK
        yield Segment(segment.slot, start, count, row), size, first, shapes.last_key(start + count)
        start, row = start + count, row + count


def _calls(
    size: int,
    alike: Sequence[tuple[int, _Run]],
    window: int | None,
    positions: Tensor,
    like: Tensor,
) -> Iterator[_Call]:
    """The calls for runs of one size; `positions` [pieces, rows] are those of the masks' rows."""
    shown, hidden = like.new_zeros(()), like.new_full((), -torch.inf)
    keys = torch.arange(max(run.end for _, run in alike))
    at = 0
    for first, run in alike:
        pieces = run.pieces
        read = positions[at : at + len(pieces), :, None]
        at += len(pieces)
        mask = torch.where(visible(read, keys[first : run.end], window), shown, hidden)
        mask = mask[0] if size > MAX_FOLDED_ROWS else mask[:, None]
        yield _Call(pieces[0].slot, len(pieces), size, first, run.end, mask)
