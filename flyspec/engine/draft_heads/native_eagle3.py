"""An EAGLE-3 head on the native step: bf16 weights, and a whole draft in one call.

For heads of bf16 targets on a CPU. What depends on tokens beyond their logits (penalties, bias) and
distributions that are drawn from go step by step, as for models.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flyspec.engine.draft_heads.base import HeadStep, check_step, draw_of
from flyspec.engine.draft_heads.eagle3 import MAX_TOKENS, Eagle3Head
from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, rotary_angles
from flyspec.engine.draft_heads.stepping import Piece, SteppingHead
from flyspec.engine.lazy_memory import lazy_zeros
from flyspec.engine.model import drafted
from flyspec.engine.native.family import HEAD_STEP, MAX_HEAD
from flyspec.engine.native.library import BatchStruct, LayerStruct, Library, ShapeStruct
from flyspec.engine.native.model import check_status, draw_at_once
from flyspec.engine.native.weights import PANEL, in_turn, pack, packed_size
from flyspec.values.tokens import Drafted

_TOLERANCE = 0.05
_TRIED_ROWS = 24


def unsupported(network: Eagle3Network) -> str:
    """Return why the native step does not run a head; empty if it does."""
    shape = network.shape
    if shape.head_dim % HEAD_STEP or shape.head_dim > MAX_HEAD:
        return f"its head size {shape.head_dim} is not a multiple of {HEAD_STEP} up to {MAX_HEAD}"
    if shape.config.hidden_size % 2:
        return f"its hidden size {shape.config.hidden_size} is odd"
    return ""


def difference(native: NativeEagle3Head, head: Eagle3Head) -> str:
    """Return how a native head differs from the same head with torch; empty if by bf16's rounding.

    Compared are the logits after some random rows, and after one more of the head's own.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(_TRIED_ROWS, head.hidden_size, generator=generator) for _ in head.hidden_layers
    ]
    tokens = [7 * i % head.vocab_size for i in range(_TRIED_ROWS + 1)]
    own, expected = native.tried(tokens, rows), head.tried(tokens, rows).float()
    known = expected > -torch.inf
    if not torch.equal(known, own > -torch.inf):
        return "it drafts other tokens"
    off = float((own - expected)[known].abs().max() / expected[known].abs().max())
    return "" if off < _TOLERANCE else f"its logits differ by {off:.2g} of the largest"


class NativeEagle3Head(SteppingHead):
    """Like `Eagle3Head`, from a float32 network of which it keeps the projection of hidden rows.

    `embedding` [vocabulary, hidden size] is in bf16. Positions of a slot count from its first one.
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
        library: Library,
    ) -> None:
        shape, config = network.shape, network.shape.config
        super().__init__(shape.target_hidden_size, len(embedding), num_slots, MAX_TOKENS)
        self.hidden_layers = shape.aux_layers
        self.num_parameters, self.fingerprint = num_parameters, fingerprint
        self._width = config.hidden_size
        self._kept: list[object] = []
        self._input = copy.deepcopy(network)  # of which only what reads the target's rows is needed
        del self._input.layers, self._input.lm_head, self._input.norm
        self._input.to(torch.bfloat16).requires_grad_(False)
        count, room = len(network.layers), length + MAX_TOKENS
        layers = (LayerStruct * count)()
        for i, (struct, layer) in enumerate(zip(layers, network.layers, strict=True)):
            self._pack_layer(struct, layer, first=i == 0)
        cosines, sines = (each[:, : shape.head_dim // 2] for each in rotary_angles(config, room))
        places = -(-room // PANEL) * PANEL
        size = (count, num_slots, shape.kv_heads, 2, places, shape.head_dim)
        cache = lazy_zeros([prod(size)], torch.bfloat16, torch.device("cpu"))
        drafts = None
        if draft_token_ids is not None:
            drafts = draft_token_ids.to(torch.int32).contiguous()
        first: Any = network.layers[0]
        self._kept += [layers, embedding, cache, drafts]
        packed = ShapeStruct(
            hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=shape.kv_heads,
            dim=shape.head_dim, intermediate=config.intermediate_size, vocabulary=len(embedding),
            layers=count, slots=num_slots, length=room, threads=1, epsilon=config.rms_norm_eps,
            scale=shape.head_dim**-0.5, layer=layers, head=self._matrix(network.lm_head.weight),
            embedding=embedding.data_ptr(), norm=self._vector(network.norm.weight),
            cosines=self._vector(cosines), sines=self._vector(sines), cache=cache.data_ptr(),
            token_norm=self._vector(first.input_layernorm.weight),
            drafts=None if drafts is None else drafts.data_ptr(),
            num_drafts=0 if drafts is None else len(drafts),
            normed_residual=shape.norm_before_residual, normed_features=shape.norm_output,
        )  # fmt: skip
        self._library, functions = library, library.functions
        self._handle = ctypes.c_void_p(functions.flyspec_open(ctypes.byref(packed)))
        weakref.finalize(self, functions.flyspec_close, self._handle)

    def _pack_layer(self, struct: LayerStruct, layer: torch.nn.Module, first: bool) -> None:
        get = dict(layer.named_parameters())
        qkv: Tensor = get["qkv_proj.weight"]
        if first:  # both halves of the input are padded
            spare = -self._width % PANEL
            halves = qkv.split(self._width, dim=1)
            qkv = torch.cat([torch.nn.functional.pad(half, (0, spare)) for half in halves], dim=1)
        gate, up = get["gate_up_proj.weight"].chunk(2)
        struct.qkv, struct.out = self._matrix(qkv), self._matrix(get["o_proj.weight"])
        struct.gate_up = self._matrix(in_turn(gate, up))
        struct.down = self._matrix(get["down_proj.weight"])
        for name in ("qkv", "o", "down"):
            bias = get.get(f"{name}_proj.bias", torch.zeros(len(get[f"{name}_proj.weight"])))
            setattr(struct, f"{'out' if name == 'o' else name}_bias", self._vector(bias))
        bias = get.get("gate_up_proj.bias", torch.zeros(2 * len(gate)))
        struct.gate_up_bias = self._vector(in_turn(*bias.chunk(2)))
        norm = "hidden_norm" if first else "input_layernorm"
        struct.norm = self._vector(get[f"{norm}.weight"])
        struct.mlp_norm = self._vector(get["post_attention_layernorm.weight"])
        if "q_norm.weight" in get:
            struct.q_norm = self._vector(get["q_norm.weight"])
            struct.k_norm = self._vector(get["k_norm.weight"])

    def _matrix(self, weight: Tensor) -> int:
        packed = torch.zeros(packed_size(weight.shape), dtype=torch.bfloat16)
        pack(weight.detach(), packed)
        self._kept.append(packed)
        return packed.data_ptr()

    def _vector(self, values: Tensor) -> int:
        flat = values.detach().float().flatten()
        kept = torch.nn.functional.pad(flat, (0, -len(flat) % PANEL)).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _fuse(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the features of the pieces' rows [rows, hidden size] in float32."""
        return torch.cat(
            [
                piece.hidden[0]
                if piece.own
                else self._input.fuse([rows.to(torch.bfloat16) for rows in piece.hidden]).float()
                for piece in pieces
            ]
        ).contiguous()

    def _begin(self, pieces: Sequence[Piece]) -> tuple[BatchStruct, list[object]]:
        """Return a batch of all pieces' rows, and what it points to."""
        ids, positions, slots, wanted = (array("i") for _ in range(4))
        for piece in pieces:
            count, start = len(piece.token_ids), piece.start - piece.slot.first
            ids.extend(piece.token_ids)
            positions.extend(range(start, start + count))
            slots.extend([self._slots.index(piece.slot)] * count)
            if piece.wanted:
                wanted.append(len(ids) - 1)
        features = self._fuse(pieces)
        batch = BatchStruct(
            len(ids), len(wanted), ids=_at(ids), positions=_at(positions), slots=_at(slots),
            wanted=_at(wanted), features=features.data_ptr(),
        )  # fmt: skip
        return batch, [ids, positions, slots, wanted, features]

    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        batch, kept = self._begin(pieces)
        logits = torch.empty(batch.num_wanted, self.vocab_size)
        own = torch.empty(batch.num_wanted, self._width)
        batch.logits, batch.own = logits.data_ptr(), own.data_ptr()
        forward = self._library.functions.flyspec_forward
        check_status(forward(self._handle, ctypes.byref(batch)))
        del kept
        return logits, own

    @torch.inference_mode()
    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        """Like `DraftHead.draft`; mostly in one call.

        Raises `ValueError` for rows that do not fit the head, `FloatingPointError` for logits that
        are not finite.
        """
        drawing = [draw_of(step) for step in steps if step.max_tokens]
        if not all(draw.is_plain for draw in drawing):
            return super().draft(steps)
        for step in steps:
            check_step(step, self, self.hidden_size, self.vocab_size)
        pieces = []
        for step in steps:
            cache = self._slots[step.slot]
            cache.begin(step.start)
            cache.held += len(step.token_ids)
            wanted = step.max_tokens > 0
            pieces.append(Piece(cache, step.start, step.token_ids, step.hidden, False, wanted))
        batch, kept = self._begin(pieces)
        # A row stands one before the token that it reads, and positions begin with the slot's.
        offsets = [self._slots[draw.step.slot].first + 1 for draw in drawing]
        drawn = draw_at_once(self._library, self._handle, batch, drawing, offsets=offsets)
        del kept
        results = iter([drafted(draw, *own) for draw, own in zip(drawing, drawn, strict=True)])
        return [next(results) if step.max_tokens else Drafted([]) for step in steps]


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
