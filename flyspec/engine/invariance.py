"""The batch-invariant mode: a token's logits have the same bits whatever a step consists of.

Belongs here: putting the mode on a model (`tiles` for its layers, the shapes of its attention) and
the trial that shows it works. What else a step may consist of: K, other sessions, the pieces of a
prompt, a prefix that was computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flyspec.engine import tiles
from flyspec.engine.attention import KEY_BLOCK, MAX_FOLDED_ROWS, Attending, Segment
from flyspec.engine.fixed_shapes import FixedAttention, Shapes
from flyspec.engine.tiles import TILE, Sizes
from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec.engine.runner import ModelRunner

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 17, 18, 20, 24, TILE, 64, 128)
"""Numbers of query rows that are tried."""
LAST_KEYS = tuple(range(32, KEY_BLOCK + 1, 32))
"""Numbers of keys in the last block that are tried."""

_MAX_ROWS = 128
_BATCH = 5
_ALONE = 8
_TRIAL_LENGTH = 90


class BatchInvariance:
    """The mode on one model, on from the start; attention shapes are tried out when first met."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._shapes: dict[tuple[int, int, int, bool], Shapes] = {}
        self._linear = tiles.tile(model)

    @property
    def fills(self) -> bool:
        """Whether some small steps must be filled up to larger ones."""
        return any(not s.allowed.issuperset(tiles.SMALL) for s in self._linear)

    def remove(self) -> None:
        """Take the mode off the model."""
        tiles.untile(self._model)

    def attention(self, segments: Sequence[Segment]) -> FixedAttention:
        """The attention of a step of these segments."""
        return FixedAttention(segments, self.shapes)

    def shapes(self, how: Attending, heads: int, kv_heads: int, dim: int) -> Shapes:
        """The shapes in which a layer's attention may run."""
        key = (heads, kv_heads, dim, how.softcap is not None)
        if key not in self._shapes:
            self._shapes[key] = attention_shapes(how, heads, kv_heads, dim, self._model.dtype)
        return self._shapes[key]


def apply(name: str, model: Any, wanted: bool | None) -> BatchInvariance | None:
    """Put the mode on a model if it is wanted, or if `wanted` is None and it costs little there.

    Raises `ConfigError` if it is wanted and cannot be had.
    """
    obstacle = None
    if model.device.type != "cpu":
        obstacle = f"it works on CPUs only, and {name} is on {model.device}; use --device cpu"
    elif tiles.is_sharded(model):
        obstacle = "sums across ranks depend on the batch; use --tensor-parallel-size 1"
    if wanted is False or (wanted is None and (obstacle or model.dtype != torch.bfloat16)):
        return None
    if obstacle:
        raise ConfigError(f"--batch-invariant: {obstacle}, or leave it out")
    mode = BatchInvariance(model)
    if wanted is None and mode.fills:
        mode.remove()
        return None
    return mode


def holds(runner: ModelRunner) -> bool:
    """Whether a sequence's logits are the same alone, a token a step, and in company."""
    from flyspec.engine.runner import Step

    cache, info = runner.cache, runner.info
    length = min(_TRIAL_LENGTH, info.context_length)
    if length < 2 * _ALONE:
        return True
    ids = [(5 * i * i + 11 * i + 1) % min(info.vocab_size, 241) for i in range(length)]
    cut = length - _ALONE
    slots = [cache.acquire().slot for _ in range(min(2, cache.num_free))]
    try:
        alone = runner.forward([Step(slots[0], 0, ids[:cut])])
        for at in range(cut, length):
            alone += runner.forward([Step(slots[0], at, ids[at : at + 1])])
        for at, others in ((0, 1), (cut // 3, 17), (cut, 7), (cut // 2, 33)):
            if at:
                runner.forward([Step(slots[-1], 0, ids[:at], 0)])
            others = min(others, length) if len(slots) > 1 else 0
            company = [Step(slots[0], 0, ids[::-1][:others])] if others else []
            rows = min(_ALONE + 1, length - at)
            *_, together = runner.forward([*company, Step(slots[-1], at, ids[at:], rows)])
            if not torch.equal(torch.cat(alone)[-rows:], together):
                return False
        return True
    finally:
        for slot in slots:
            cache.release(slot)


@torch.inference_mode()
def attention_shapes(
    how: Attending, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> Shapes:
    """The numbers of rows and of keys whose bits are those of `TILE` rows and whole blocks."""
    generator = torch.Generator().manual_seed(heads * dim)
    rows, last_keys, batched = set(ROWS), set(LAST_KEYS), True
    for base in (0, KEY_BLOCK):
        for last in LAST_KEYS:
            trial = _Trial(how, heads, kv_heads, dim, dtype, base + last, generator)
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
    # A single row a piece has one shape and one place, whatever the kernels do.
    return Shapes(Sizes(rows or {1}), Sizes(last_keys or {KEY_BLOCK}), batched and bool(rows))


class _Trial:
    """Attention whose sums are 0 but for rounding, so that another order of any sum shows.

    Products of queries and keys cancel, and the scale blows up what remains; keys come in pairs
    with opposite values. All queries read the first `length` keys.
    """

    def __init__(
        self,
        how: Attending,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        length: int,
        generator: torch.Generator,
    ) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self._how = how._replace(window=None, scale=2.0 ** (48 if dtype == torch.float64 else 20))
        self._group, self._length = heads // kv_heads, length - 5
        half = dim // 2
        self._query = random(heads, _MAX_ROWS, dim)
        self._query[..., half : 2 * half] = self._query[..., :half]
        keys, values = (random(1, kv_heads, 3 * KEY_BLOCK, dim) for _ in range(2))
        keys[..., half : 2 * half] = -keys[..., :half]
        values *= random(1, kv_heads, 3 * KEY_BLOCK, 1).exp()
        one, other = torch.randperm(self._length, generator=generator)[:-1].view(2, -1)
        keys[:, :, other], values[:, :, other] = keys[:, :, one], -values[:, :, one]
        # As in a slot: a position's heads stand together.
        self._states = [s.transpose(1, 2).contiguous().transpose(1, 2) for s in (keys, values)]

    def same_in_a_batch(self, count: int, end: int) -> bool:
        """Whether a piece of `count` rows has the same bits several times in a call."""
        mask = torch.zeros(_BATCH, 1, count * self._group, end, dtype=self._query.dtype)
        mask[..., self._length :] = -torch.inf
        keys, values = (s[:, :, :end].expand(_BATCH, -1, -1, -1) for s in self._states)
        query = self._query[:, :count].reshape(1, keys.shape[1], self._group * count, -1)
        alone = self._how.apply(query, keys[:1], values[:1], mask[:1])
        query = query.expand(_BATCH, -1, -1, -1).contiguous()
        return torch.equal(self._how.apply(query, keys, values, mask), alone.expand_as(query))

    def run(self, first: int, count: int, end: int) -> Tensor:
        """Attention of some queries over keys up to `end`."""
        mask = torch.zeros(count, end, dtype=self._query.dtype)
        mask[:, self._length :] = -torch.inf
        if count <= MAX_FOLDED_ROWS:
            mask = mask.repeat(self._group, 1)
        keys, values = (s[:, :, :end] for s in self._states)
        query = self._query[:, first : first + count].contiguous()
        return self._how.attend(query, keys, values, mask)
