"""Heads that draft token by token from a cache of their own: EAGLE-3 and MTP share all but the
network.

Tokens are drawn as `stepwise` draws them for models, so a head follows the rules of `Draw`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flyspec.engine import stepwise
from flyspec.engine.draft_heads.base import HeadStep, check_step, draw_of
from flyspec.engine.model import Rows, Step
from flyspec.values.tokens import Drafted

_ROOM = 256
"""Positions by which a slot's cache grows at least."""


class Piece(NamedTuple):
    """Rows of a sequence that a head reads in one call.

    The first one is at absolute position `start`; the slot's cache holds those before it from its
    first one on. `token_ids` follow each position, `hidden` are the rows there, as the target gave
    them or, in `own`, as the head did. The last row's logits are wanted if `wanted`.
    """

    slot: HeadCache
    start: int
    token_ids: Sequence[int]
    hidden: tuple[Tensor, ...]
    own: bool
    wanted: bool


class HeadCache:
    """Keys and values of a slot, in memory that grows with its sequence.

    `first` is the absolute position of the first one; `held` of them belong to the sequence, and
    drafted tokens' are beyond. `rows` are the head's own hidden row for the next step.
    """

    __slots__ = ("first", "held", "layers", "rows")

    def __init__(self) -> None:
        self.first = self.held = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows: Tensor | None = None

    @property
    def end(self) -> int:
        """The first position that is not held."""
        return self.first + self.held

    def begin(self, start: int) -> None:
        """Continue after `start` positions; what is missing before it stays missing."""
        if not self.first <= start <= self.end:
            self.first = start
        self.held = start - self.first

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [KV heads, n, dim] from a position on; return all up to there."""
        at, count = start - self.first, k.shape[1]
        kept = self.layers.get(layer)
        if kept is None or kept[0].shape[1] < at + count:
            kept = self._grown(kept, at, count, k, v)
            self.layers[layer] = kept
        keys, values = kept
        keys[:, at : at + count], values[:, at : at + count] = k, v
        return keys[:, : at + count], values[:, : at + count]

    @staticmethod
    def _grown(
        kept: tuple[Tensor, Tensor] | None, at: int, count: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        room = max(at + count + _ROOM, 2 * at)
        found = []
        for i, like in enumerate((k, v)):
            grown = like.new_zeros((like.shape[0], room, like.shape[2]))
            if kept is not None:
                grown[:, :at] = kept[i][:, :at]
            found.append(grown)
        return found[0], found[1]


class SteppingHead(ABC):
    """A head that reads a token at a time; a subclass runs its network (`_read`)."""

    kind: str
    hidden_layers: tuple[int, ...]
    num_parameters: int
    fingerprint: str

    def __init__(self, hidden_size: int, vocab_size: int, num_slots: int, max_tokens: int) -> None:
        self.hidden_size, self.max_tokens = hidden_size, max_tokens
        self.vocab_size = vocab_size
        self._slots = [HeadCache() for _ in range(num_slots)]

    @abstractmethod
    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Read all pieces and cache them.

        Returns logits [wanted pieces, vocabulary], -infinity for tokens that the head does not
        know, and the head's own hidden rows there [wanted pieces, hidden size].
        """

    def held(self, slot: int) -> int:
        """Return the end of the positions that it holds of a slot, with nothing missing after its
        first one."""
        return self._slots[slot].end

    def forget(self, slot: int) -> None:
        """Drop what it holds of a slot, and its memory."""
        self._slots[slot] = HeadCache()

    @torch.inference_mode()
    def tried(self, token_ids: Sequence[int], hidden: Sequence[Tensor]) -> Tensor:
        """Return the logits [2, vocabulary] after all but the last token, which follow the target's
        rows `hidden`, and after the last one, which follows the head's own; empties slot 0."""
        (cache, *_), count = self._slots, len(token_ids) - 1
        cache.begin(0)
        first, own = self._read([Piece(cache, 0, token_ids[:-1], tuple(hidden), False, True)])
        cache.held = count
        then, _ = self._read([Piece(cache, count, token_ids[-1:], (own,), True, True)])
        self.forget(0)
        return torch.cat([first, then])

    @torch.inference_mode()
    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        """Like `DraftHead.draft`. Raises `ValueError` for rows that do not fit the head."""
        for step in steps:
            check_step(step, self, self.hidden_size, self.vocab_size)
        for step in steps:
            self._slots[step.slot].begin(step.start)
        draws = [draw_of(step) for step in steps]
        given = {step.slot: step for step in steps}

        def forward(now: Sequence[Step]) -> list[Rows]:
            pieces = []
            for slot, start, token_ids, *_ in now:
                cache, step = self._slots[slot], given.pop(slot, None)
                if step is not None:
                    hidden, wanted = step.hidden, step.max_tokens > 0
                else:
                    assert cache.rows is not None
                    hidden, wanted = (cache.rows,), True
                pieces.append(Piece(cache, start - 1, token_ids, hidden, step is None, wanted))
                if step is not None:
                    cache.held += len(token_ids)
            logits, rows = self._read(pieces)
            found, at = [], 0
            for piece in pieces:
                count = int(piece.wanted)
                piece.slot.rows = rows[at : at + count]
                found.append(Rows(logits[at : at + count]))
                at += count
            return found

        return stepwise.draw(forward, draws)


class Packed(NamedTuple):
    """Rows of pieces behind each other, on the head's device.

    `ends`: where each piece's rows end. `wanted` are the rows whose logits are wanted.
    """

    pieces: Sequence[Piece]
    ends: Sequence[int]
    token_ids: Tensor
    positions: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Packed:
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for piece in pieces:
            tokens += piece.token_ids
            positions += range(piece.start, piece.start + len(piece.token_ids))
            ends.append(len(tokens))
        wanted = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.wanted]
        both = torch.tensor([tokens, positions], device=device)
        return cls(
            pieces, ends, both[0], both[1], torch.tensor(wanted, dtype=torch.int64, device=device)
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Cache keys and values [rows, KV heads, dim], and attend to all of the own sequence up to
        each row. Queries are [rows, heads, dim]; returns [rows, heads * dim of the values].
        """
        found, at = [], 0
        for piece, end in zip(self.pieces, self.ends, strict=True):
            found.append(_attend(piece, layer, q[at:end], k[at:end], v[at:end], scale))
            at = end
        return torch.cat(found) if len(found) > 1 else found[0]


def _attend(piece: Piece, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    count, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    keys, values = piece.slot.write(layer, piece.start, k.transpose(0, 1), v.transpose(0, 1))
    # The heads that share a KV head stand beside each other as rows.
    rows = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None
    if count > 1:
        before = keys.shape[1] - count
        seen = torch.ones(count, keys.shape[1], dtype=torch.bool, device=q.device).tril(before)
        mask = seen.repeat(group, 1)
    out: Tensor = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
    apart: Tensor = out.unflatten(1, (group, count))
    return apart.permute(2, 0, 1, 3).reshape(count, -1)
