"""Attention of a packed step in shapes that give a row the same bits, whatever else is in the step.

A segment runs in pieces of certain numbers of rows, over whole blocks of keys and a last one of
certain lengths; what fills them up is masked or thrown away. Pieces of one shape whose slots stand
side by side run in one call: that changes no sum. Which shapes these are is found in `invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyspec.engine.attention import KEY_BLOCK, MAX_FOLDED_ROWS, Attending, Segment
from flyspec.engine.slots import SlotLayer
from flyspec.engine.tiles import Sizes

CALL_COST = 128
"""Keys times rows that take about as long as one more call."""


class Shapes(NamedTuple):
    """Numbers of query rows, and of keys in the last block, that give a row the same bits.

    `batched`: so does running several pieces in one call.
    """

    rows: Sizes
    keys: Sizes
    batched: bool

    def last_key(self, end: int) -> int:
        """Where the keys end that are read for a sequence of length `end`."""
        whole = (end - 1) // KEY_BLOCK * KEY_BLOCK
        return whole + (self.keys.fit(end - whole) or KEY_BLOCK)


class _Call(NamedTuple):
    """Pieces of `size` rows each, in `slots` slots from `slot` on, over keys `first` to `end`.

    A single piece is of `length` packed rows from `row` on. Of several, `rows` are the packed rows
    of all places; `kept` are the places that are no filling, `targets` their rows.
    """

    slot: int
    slots: int
    size: int
    first: int
    end: int
    mask: Tensor
    row: int = 0
    length: int = 0
    rows: Tensor | None = None
    kept: Tensor | None = None
    targets: Tensor | None = None


class FixedAttention:
    """Attention of one step's segments; `shapes` is asked with a layer's heads, KV heads, size."""

    def __init__(
        self,
        segments: Sequence[Segment],
        shapes: Callable[[Attending, int, int, int], Shapes],
    ) -> None:
        self._segments = sorted(segments)  # by slot
        self._shapes = shapes
        self._plans: dict[tuple[Attending, int, int, int], list[_Call]] = {}

    def attend(self, query: Tensor, layer: SlotLayer, how: Attending) -> Tensor:
        """[T, heads, dim] for `query` [heads, T, dim]."""
        heads, total, dim = query.shape
        kv_heads = layer.num_heads
        group = heads // kv_heads
        key = (how, heads, kv_heads, dim)
        calls = self._plans.get(key)
        if calls is None:
            calls = self._plans[key] = list(self._plan(how, query, kv_heads))
        out: Tensor | None = None
        for call in calls:
            keys, values = layer.read(call.slot, call.first, call.end, call.slots)
            # Copied unless contiguous: strides count as shape does.
            if call.rows is not None:
                q = query.index_select(1, call.rows)
            else:
                q = query[:, call.row : call.row + call.length]
                if call.length < call.size:
                    q = pad(q, (0, 0, 0, call.size - call.length))
            if call.size <= MAX_FOLDED_ROWS:
                if call.slots > 1:
                    q = q.view(kv_heads, group, call.slots, call.size, dim).permute(2, 0, 1, 3, 4)
                q = q.reshape(call.slots, kv_heads, group * call.size, dim).contiguous()
                result = how.apply(q, keys, values, call.mask)
            else:
                result = how.apply_grouped(q[None].contiguous(), keys, values, call.mask)
            result = result.view(call.slots, heads, call.size, -1).transpose(1, 2)
            if call.length == total:
                return result[0, :total]
            if out is None:
                out = result.new_empty((total, heads, result.shape[-1]))
            if call.targets is None:
                out[call.row : call.row + call.length] = result[0, : call.length]
            else:
                places = result.reshape(call.slots * call.size, heads, -1)
                places = places if call.kept is None else places.index_select(0, call.kept)
                out.index_copy_(0, call.targets, places)
        assert out is not None
        return out

    def _plan(self, how: Attending, query: Tensor, kv_heads: int) -> Iterator[_Call]:
        """The calls of a layer, over all segments."""
        heads, _, dim = query.shape
        shapes = self._shapes(how, heads, kv_heads, dim)
        batched = shapes.batched and how.softcap is None
        runs: dict[tuple[int, int], list[_Run]] = {}
        for segment in self._segments:
            for piece, size, first, end in _pieces(segment, shapes, how):
                alike = runs.setdefault((size, first), [])
                if not (batched and alike and alike[-1].take(piece, size, end)):
                    alike.append(_Run([piece], end))
        for (size, first), alike in runs.items():
            for run in alike:
                yield _call(run, size, first, how, query, heads // kv_heads)


class _Run:
    """Pieces of one size in slots side by side, read up to the same `end`."""

    def __init__(self, pieces: list[Segment], end: int) -> None:
        self.pieces, self.end = pieces, end

    def take(self, piece: Segment, size: int, end: int) -> bool:
        """Take in the next slot, if reading further for the others costs less than a call."""
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
    """A segment's rows in pieces: each one's size, and the keys from and up to which it reads."""
    start, row = segment.start, segment.row
    for size in shapes.rows.pieces(segment.length):
        count = min(size, segment.end - start)
        # Blocks begin where they begin for every other row of the sequence.
        first = how.first_key(start) // KEY_BLOCK * KEY_BLOCK
        yield Segment(segment.slot, start, count, row), size, first, shapes.last_key(start + count)
        start, row = start + count, row + count


def _call(run: _Run, size: int, first: int, how: Attending, query: Tensor, group: int) -> _Call:
    pieces, end = run.pieces, run.end
    masks = [_mask(piece.start - first, size, end - first, how.window, query) for piece in pieces]
    if size <= MAX_FOLDED_ROWS:
        masks = [mask.repeat(group, 1) for mask in masks]
    if len(pieces) == 1:
        (piece,) = pieces
        return _Call(piece.slot, 1, size, first, end, masks[0], piece.row, piece.length)
    counts = torch.tensor([piece.length for piece in pieces])[:, None]
    places = torch.arange(size)
    rows = torch.tensor([piece.row for piece in pieces])[:, None]
    rows = (rows + torch.minimum(places, counts - 1)).flatten()
    full = all(piece.length == size for piece in pieces)
    kept = None if full else (places < counts).flatten().nonzero()[:, 0]
    targets = rows if kept is None else rows[kept]
    mask = torch.stack(masks)[:, None]
    return _Call(pieces[0].slot, len(pieces), size, first, end, mask,
                 rows=rows, kept=kept, targets=targets)  # fmt: skip


def _mask(start: int, size: int, end: int, window: int | None, like: Tensor) -> Tensor:
    """-inf where queries at `start` and behind may not read keys 0 to `end`, else 0."""
    hidden = like.new_full((size, end), -torch.inf)
    if window is None or window > start + size:
        return hidden.triu_(start + 1)
    return hidden.triu(start + 1) + hidden.tril_(start - window)
