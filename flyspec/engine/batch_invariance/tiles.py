"""Row-wise layers whose result for a row does not depend on the other rows, bit for bit.

Kernels choose the order of their sums by the shape of their operands, and the end of a vector loop
may round differently from its middle. A trial on this machine finds the numbers of rows that give
the bits of a tile of `TILE` rows; linear layers then run only in pieces of such sizes, padded if
necessary, and activations run so that no vector is partly filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers.activations import ACT2CLS

TILE = 32
"""Rows of the tile whose bits all other sizes must match."""
SMALL = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 17, 18, 20, 24, 28, TILE)
LARGE = (*range(40, 128, 8), *range(128, 320, 16), *range(320, 513, 64))
"""Numbers of rows to try: dense enough that padding to the next one costs little."""
LARGE_WEIGHT = 1 << 26
"""Elements of a weight from which only sizes up to a tile are tried: more would take too long."""
MAX_FILLING = 16
"""Maximum rows of padding, or an eighth of the rows if that is more, before splitting a piece."""

VECTOR = 64
"""A whole number of iterations of the vector loops in torch's CPU kernels, in elements."""
GRAIN = 16384
"""Maximum elements that those kernels process in a single thread; for some it is twice this."""


class Sizes:
    """Numbers of rows (or keys) that give the same bits."""

    def __init__(self, allowed: Iterable[int]) -> None:
        self.allowed = frozenset(allowed)
        self._ascending = sorted(self.allowed)
        self._pieces: dict[int, tuple[int, ...]] = {}

    def fit(self, count: int) -> int | None:
        """Return the smallest size that holds `count`; None if none does."""
        return next((size for size in self._ascending if size >= count), None)

    def pieces(self, count: int) -> tuple[int, ...]:
        """Return sizes that together hold `count`; only the last one may need padding."""
        found = self._pieces.get(count)
        if found is None:
            found = self._pieces[count] = tuple(self._split(count))
        return found

    def _split(self, count: int) -> Iterable[int]:
        while count > 0:
            size = self.fit(count)
            if size is None or size - count > max(MAX_FILLING, count // 8):
                size = max((s for s in self._ascending if s <= count), default=size)
            assert size is not None
            yield size
            count -= size


class TiledLinear:
    """A linear layer's forward, run in pieces of `sizes` rows."""

    def __init__(self, layer: torch.nn.Linear, sizes: Sizes) -> None:
        self._weight, self._bias = layer.weight, layer.bias
        self._pieces, self._allowed = sizes.pieces, sizes.allowed

    def __call__(self, input: Tensor) -> Tensor:
        *rows, width = input.shape
        count = prod(rows)
        if count in self._allowed:
            return linear(input.contiguous(), self._weight, self._bias)
        pieces = self._pieces(count)
        places = pad(input.reshape(count, width), (0, 0, 0, sum(pieces) - count))
        parts = [linear(piece, self._weight, self._bias) for piece in places.split(pieces)]
        return torch.cat(parts)[:count].view(*rows, -1)


class AlignedActivation:
    """An elementwise activation's forward, run so that every element is inside a whole vector."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward

    def __call__(self, input: Tensor) -> Tensor:
        count = input.numel()
        if _aligned(count, torch.get_num_threads()) and input.is_contiguous():
            return self._forward(input)
        flat = pad(input.reshape(-1), (0, -count % VECTOR))
        out = torch.cat([self._forward(piece) for piece in flat.split(GRAIN)])
        return out[:count].view(input.shape)


@lru_cache(maxsize=4096)
def _aligned(count: int, threads: int) -> bool:
    """True if every thread's share of `count` elements consists of whole vectors."""
    shares = {1, threads, *(min(threads, -(-count // (GRAIN * n))) for n in (1, 2))}
    return all(-(-count // share) % VECTOR == 0 for share in shares)


def tile(model: torch.nn.Module) -> list[Sizes]:
    """Make linear layers and activations row-invariant; return the linear layers' sizes."""
    found: dict[tuple[int, int, torch.dtype, bool], Sizes] = {}
    activations: tuple[Any, ...] = tuple(
        c[0] if isinstance(c, tuple) else c for c in ACT2CLS.values()
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight
            key = (*weight.shape, weight.dtype, module.bias is not None)
            if key not in found:
                found[key] = linear_sizes(*key)
            module.forward = TiledLinear(module, found[key])  # type: ignore[method-assign]
        elif isinstance(module, activations):
            module.forward = AlignedActivation(module.forward)
    return list(found.values())


def untile(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), TiledLinear | AlignedActivation):
            del module.forward


@torch.inference_mode()
def linear_sizes(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool = False
) -> Sizes:
    """Return the numbers of rows whose bits match a tile's, for a linear layer of this shape."""
    generator = torch.Generator().manual_seed(out_features * in_features)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    large = out_features * in_features >= LARGE_WEIGHT
    candidates = SMALL if large else SMALL + LARGE
    # Every product has its opposite: sums are 0 except for rounding, which depends on the order.
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    weight = random(out_features, in_features)
    rows = random(max(*candidates, 2 * TILE), in_features)
    weight[:, order[half : 2 * half]] = -weight[:, order[:half]]
    rows[:, order[half : 2 * half]] = rows[:, order[:half]]
    offset = 1e-6 * random(out_features) if bias else None

    def run(x: Tensor) -> Tensor:
        return linear(x[None], weight, offset)[0]

    def tiles(x: Tensor) -> Tensor:
        return torch.cat([run(piece) for piece in x.split(TILE)])

    expected = tiles(rows)
    mixed = torch.randperm(len(rows), generator=generator)
    if not torch.equal(tiles(rows[mixed]), expected[mixed]):
        return Sizes([1])
    return Sizes(
        size
        for size in candidates
        if all(
            torch.equal(run(rows[first : first + size]), expected[first : first + size])
            for first in {0, len(rows) - size}
        )
    )
