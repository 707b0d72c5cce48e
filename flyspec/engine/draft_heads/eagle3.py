"""Drafts with an EAGLE-3 head (arXiv 2503.01840): one network over hidden rows of three layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flyspec.engine.draft_heads.base import over_vocabulary
from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, rotary_angles
from flyspec.engine.draft_heads.stepping import Packed, Piece, SteppingHead

MAX_TOKENS = 32
"""Tokens drafted at once; trained heads are unrolled over 5 to 8."""


class Eagle3Head(SteppingHead):
    """An EAGLE-3 head with its cache.

    `embedding` [vocabulary, hidden size] is the target's or the head's own, in the network's data
    type; `draft_token_ids` are the target's ids of the tokens that it can draft, None for all.
    `length`: the longest sequence.
    """

    kind = "eagle3"

    def __init__(
        self,
        network: Eagle3Network,
        embedding: Tensor,
        draft_token_ids: Tensor | None,
        num_slots: int,
        length: int,
        num_parameters: int,
        fingerprint: str,
    ) -> None:
        shape = network.shape
        super().__init__(shape.target_hidden_size, len(embedding), num_slots, MAX_TOKENS)
        self.hidden_layers = shape.aux_layers
        self.num_parameters, self.fingerprint = num_parameters, fingerprint
        self._network = network.eval().requires_grad_(False)
        self._embedding, self._ids = embedding, draft_token_ids
        self._scale = shape.head_dim**-0.5
        angles = rotary_angles(shape.config, length + MAX_TOKENS)
        self._cosines, self._sines = (each.to(embedding.device, embedding.dtype) for each in angles)

    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        network, packed = self._network, Packed.of(pieces, self._embedding.device)
        embedded = self._embedding[packed.token_ids]
        angles = self._cosines[packed.positions], self._sines[packed.positions]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed.attend(layer, q, k, v, self._scale)

        read, following = network.run(embedded, self._hidden(pieces), angles, attend)
        if len(packed.wanted) < len(read):
            read, following = read[packed.wanted], following[packed.wanted]
        logits = over_vocabulary(network.lm_head(read), self._ids, self.vocab_size)
        return logits, following

    def _hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the pieces' hidden rows: the target's, fused, and the head's own."""
        like, given = self._embedding, [p for p in pieces if not p.own]
        fused: Iterator[Tensor] = iter(())
        if given:
            layers = zip(*(p.hidden for p in given), strict=True)
            rows = [torch.cat(layer).to(like.device, like.dtype) for layer in layers]
            fused = iter(self._network.fuse(rows).split([len(p.token_ids) for p in given]))
        return torch.cat([p.hidden[0] if p.own else next(fused) for p in pieces])
