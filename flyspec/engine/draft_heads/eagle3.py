"""Drafts with an EAGLE-3 head (arXiv 2503.01840): one network over hidden rows of three layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, rotary_angles
from flyspec.engine.draft_heads.stepping import Piece, SteppingHead, attend

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
        fingerprint: str,
        owns_embedding: bool = False,
    ) -> None:
        super().__init__(len(embedding), num_slots, MAX_TOKENS)
        shape = network.shape
        self.hidden_layers, self.hidden_size = shape.aux_layers, shape.target_hidden_size
        self.fingerprint = fingerprint
        self.num_parameters = sum(each.numel() for each in network.parameters())
        self.num_parameters += embedding.numel() if owns_embedding else 0
        self._network = network.eval().requires_grad_(False)
        self._embedding, self._ids = embedding, draft_token_ids
        self._scale = shape.head_dim**-0.5
        weight = network.lm_head.weight
        self._dtype, device = weight.dtype, weight.device
        angles = rotary_angles(shape.config, length + MAX_TOKENS)
        self._cosines, self._sines = (each.to(device, self._dtype) for each in angles)

    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        network, device = self._network, self._embedding.device
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for piece in pieces:
            tokens += piece.token_ids
            positions += range(piece.start, piece.start + len(piece.token_ids))
            ends.append(len(tokens))
        given = [
            tuple(rows.to(device, self._dtype) for rows in p.hidden) for p in pieces if not p.own
        ]
        fused = None
        if given:
            joined = [torch.cat(rows) if len(given) > 1 else rows[0] for rows in zip(*given)]
            fused = network.fuse(joined)
        hidden = fused if len(given) == len(pieces) else self._joined(pieces, fused)
        index = torch.tensor([tokens, positions], device=device)
        embedded = self._embedding[index[0]]
        angles = self._cosines[index[1]], self._sines[index[1]]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found, at = [], 0
            for piece, end in zip(pieces, ends, strict=True):
                found.append(attend(piece, layer, q[at:end], k[at:end], v[at:end], self._scale))
                at = end
            return torch.cat(found) if len(found) > 1 else found[0]

        read, following = network.run(embedded, hidden, angles, attention)
        last = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.wanted]
        if len(last) < len(read):
            read, following = read[last], following[last]
        logits = network.lm_head(read)
        if self._ids is not None:
            logits = logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(
                1, self._ids, logits
            )
        return logits, following

    def _joined(self, pieces: Sequence[Piece], fused: Tensor | None) -> Tensor:
        """Return the pieces' hidden rows in their order, the target's fused, the head's own."""
        found, at = [], 0
        for piece in pieces:
            if piece.own:
                found += piece.hidden
                continue
            assert fused is not None
            found.append(fused[at : (at := at + len(piece.token_ids))])
        return torch.cat(found) if len(found) > 1 else found[0]
