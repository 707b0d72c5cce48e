"""Finds, by trial on this machine, the shapes in which attention gives a row the same bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flyspec.engine.attention.base import KEY_BLOCK, MAX_FOLDED_ROWS, Attending
from flyspec.engine.batch_invariance.tiles import TILE, Sizes

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
