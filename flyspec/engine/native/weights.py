"""Packs a transformers module's weights once, as step.cpp expects them.

Matrices are packed in zero-padded panels of 64 outputs, with pairs along K adjacent: bf16
[N/64, K/2, 64, 2]. q, k and v form one matrix; so do gate and up, alternating 32 outputs of each.
Norms and biases are float32, padded likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flyspec.engine.lazy_memory import allocate
from flyspec.engine.native.family import head_dim
from flyspec.engine.native.library import LayerStruct, ShapeStruct

PANEL = 64


class PackedWeights:
    """A model's weights in separate memory; `shape` points into it.

    `shape` lacks the fields of the cache. Raises `ValueError` for a module with weights that its
    family does not have, or a rotary embedding that does not rotate heads by halves.
    """

    def __init__(self, model: Any, length: int) -> None:
        config, core = model.config, model.model
        self._kept: list[Any] = []
        # By name, as two may share a tensor.
        self._left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._blocks: list[tuple[int, int, Callable[[Tensor], None]]] = []
        dim = head_dim(config)
        layers = (LayerStruct * config.num_hidden_layers)()
        tied = model.lm_head.weight is core.embed_tokens.weight
        plans = [self._plan_layer(layer) for layer in core.layers]
        head = self._take(model.lm_head)
        embedding = self._take(core.embed_tokens)
        sizes = [size for plan in plans for _, size, _ in plan] + [packed_size(head.shape)]
        ends = [0, *accumulate(-(-size // 2048) * 2048 for size in sizes)]
        memory = allocate(2 * ends[-1])
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        self._kept += [memory, flat, layers]
        at = iter(ends)
        for struct, layer, plan in zip(layers, core.layers, plans, strict=True):
            for name, size, fill in plan:
                place = flat[(start := next(at)) : start + size]
                fill(place)
                setattr(struct, name, place.data_ptr())
            self._vectors(struct, layer)
        start = next(at)
        pack(head, flat[start : start + packed_size(head.shape)])
        cosines, sines = self._angles(core.rotary_emb, length, dim)
        if not tied:
            # Not copied; it stays even if the module is dropped.
            embedding = embedding.to(torch.bfloat16).contiguous()
            self._kept.append(embedding)
        self.shape = ShapeStruct(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=dim,
            intermediate=config.intermediate_size,
            vocabulary=head.shape[0],
            layers=config.num_hidden_layers,
            length=length,
            epsilon=config.rms_norm_eps,
            scale=float(core.layers[0].self_attn.scaling),
            layer=layers,
            head=flat[start:].data_ptr(),
            embedding=None if tied else embedding.data_ptr(),
            norm=self._vector(core.norm),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
        )
        if self._left:
            raise ValueError(f"it has unexpected weights: {', '.join(sorted(self._left)[:3])}")

    def _take(self, module: Any, kind: str = "weight") -> Tensor:
        self._left.discard(f"{self._names[id(module)]}.{kind}")
        tensor: Tensor = getattr(module, kind).detach()
        return tensor

    def _plan_layer(self, layer: Any) -> list[tuple[str, int, Callable[[Tensor], None]]]:
        """Name, packed size and writer of each of a layer's matrices."""
        attention, mlp = layer.self_attn, layer.mlp
        together = [self._take(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        rows = sum(len(weight) for weight in together)
        out, down = self._take(attention.o_proj), self._take(mlp.down_proj)
        gate, up = self._take(mlp.gate_proj), self._take(mlp.up_proj)
        width = gate.shape[1]
        return [
            ("qkv", packed_size((rows, width)), lambda to: pack(torch.cat(together), to)),
            ("out", packed_size(out.shape), lambda to: pack(out, to)),
            (
                "gate_up",
                2 * packed_size(gate.shape),
                lambda to: pack(in_turn(gate, up), to),
            ),
            ("down", packed_size(down.shape), lambda to: pack(down, to)),
        ]

    def _vectors(self, struct: LayerStruct, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        heads = [attention.q_proj, attention.k_proj, attention.v_proj]
        struct.qkv_bias = self._keep(torch.cat([self._bias(m) for m in heads]))
        struct.out_bias = self._keep(self._bias(attention.o_proj))
        struct.gate_up_bias = self._keep(
            in_turn(self._bias(mlp.gate_proj), self._bias(mlp.up_proj))
        )
        struct.down_bias = self._keep(self._bias(mlp.down_proj))
        struct.norm = self._vector(layer.input_layernorm)
        struct.mlp_norm = self._vector(layer.post_attention_layernorm)
        if hasattr(attention, "q_norm"):
            struct.q_norm = self._vector(attention.q_norm)
            struct.k_norm = self._vector(attention.k_norm)
        struct.window = window_of(layer)

    def _bias(self, module: Any) -> Tensor:
        if module.bias is None:
            return torch.zeros(len(module.weight))
        return self._take(module, "bias")

    def _vector(self, module: Any) -> int:
        return self._keep(self._take(module))

    def _keep(self, values: Tensor) -> int:
        """The address of the values in float32, zero-padded to a whole panel."""
        values = values.float().flatten()
        kept = torch.zeros(-(-len(values) // PANEL) * PANEL)
        kept[: len(values)] = values
        self._kept.append(kept)
        return kept.data_ptr()

    def _angles(self, rotary: Any, length: int, dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, dim / 2] of the module's own rotary embedding."""
        places = torch.arange(length)[None]
        with torch.inference_mode():
            tables = [table[0] for table in rotary(torch.zeros(1), places)]
        halves = []
        for table in tables:
            if table.shape != (length, dim) or not torch.equal(*table.split(dim // 2, dim=1)):
                raise ValueError("its rotary embedding does not rotate heads by halves")
            halves.append(table[:, : dim // 2])
        return halves[0], halves[1]


def window_of(layer: Any) -> int:
    """Return the number of positions that a layer's rows see, including their own; 0 for all."""
    attention = layer.self_attn
    # Mistral reads it from its configuration, Qwen from the layer.
    where = attention if hasattr(attention, "sliding_window") else attention.config
    declared = hasattr(where, "sliding_window") and attention.config.model_type != "llama"
    return int(where.sliding_window or 0) if declared else 0


def packed_size(shape: Sequence[int]) -> int:
    rows, width = (-(-n // PANEL) * PANEL for n in shape)
    return rows * width


def pack(weight: Tensor, to: Tensor) -> None:
    """Write `weight` [N, K] in panels to `to`, whose padding must already be zero."""
    rows, width = weight.shape
    panels = to.view(-1, -(-width // PANEL) * PANEL // 2, PANEL, 2)
    whole = rows // PANEL * PANEL
    for first, last in ((0, whole), (whole, rows)):
        if first == last:
            continue
        height = min(PANEL, last - first)
        part = weight[first:last]
        if width % 2:
            part = torch.nn.functional.pad(part, (0, 1))
        part = part.reshape(-1, height, part.shape[1] // 2, 2).transpose(1, 2)
        panels[first // PANEL : -(-last // PANEL), : part.shape[1], :height] = part


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Alternate 32 rows of `gate` and 32 of `up`, zero-padded to whole panels."""
    half, short = PANEL // 2, -len(gate) % PANEL
    if short:
        gate, up = (torch.cat([x, x.new_zeros(short, *x.shape[1:])]) for x in (gate, up))
    both = torch.stack([x.reshape(-1, half, *x.shape[1:]) for x in (gate, up)], dim=1)
    return both.flatten(0, 2)
