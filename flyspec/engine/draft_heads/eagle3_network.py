"""The network of an EAGLE-3 head: its sizes, its weights by published name, and its arithmetic.

What drafts with it (`eagle3`) and what trains it (flyspec-lab) differ only in which keys a row
attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of layer i: rotated queries [rows, heads, dim], rotated keys and values
[rows, KV heads, dim] to [rows, heads * dim]."""


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes and variants of a head (arXiv 2503.01840), as its configuration declares them.

    `config` is the decoder layers'. `aux_layers` are numbered as in `Step.hidden_layers`.
    `draft_vocab_size`: tokens that it can draft. `qk_norm`: queries and keys are normalised, as in
    Qwen3. `norm_before_residual`: the residual begins after the hidden row's norm. `norm_before_fc`
    normalises the concatenated rows, `fc_norm` each of them. `norm_output`: the next token's hidden
    row is the one after the final norm, not before it.
    """

    config: LlamaConfig
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        config = self.config
        return int(config.head_dim or config.hidden_size // config.num_attention_heads)


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one reads [embedding ; hidden row], others a hidden row."""

    def __init__(self, shape: Eagle3Shape, first: bool) -> None:
        super().__init__()
        config, dim = shape.config, shape.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.first, self.norm_before_residual = first, shape.norm_before_residual
        self.heads, self.kv_heads = config.num_attention_heads, shape.kv_heads
        self.dim = dim
        rows = (self.heads + 2 * self.kv_heads) * dim
        self.qkv_proj = nn.Linear(hidden * (2 if first else 1), rows, config.attention_bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, config.attention_bias)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps) if first else None
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.q_norm = nn.RMSNorm(dim, eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, eps) if shape.qk_norm else None

    def run(
        self,
        embedded: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        i: int,
    ) -> Tensor:
        """Return the residual stream after the layer, all of them [rows, hidden size]."""
        residual = hidden
        if self.hidden_norm is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        else:
            read = self.input_layernorm(hidden)
        qkv = self.qkv_proj(read).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        residual = residual + self.o_proj(attend(i, rotate(q, angles), rotate(k, angles), v))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(residual)).chunk(2, dim=-1)
        found: Tensor = residual + self.down_proj(F.silu(gate) * up)
        return found


class Eagle3Network(nn.Module):
    """All weights but the embedding, which is the target's or the head's own.

    Projections that read the same rows are one matrix; `load_published` and `published` translate.
    """

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        config = shape.config
        self.shape = shape
        width, count = shape.target_hidden_size, len(shape.aux_layers)
        eps = config.rms_norm_eps
        self.fc = nn.Linear(width * count, config.hidden_size, shape.fc_bias)
        self.input_norm = nn.RMSNorm(width * count, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(count)) if shape.fc_norm else None
        )
        self.layers = nn.ModuleList(
            Eagle3Layer(shape, first=i == 0) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocab_size, False)

    def fuse(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the hidden rows [rows, hidden size] of the target's, one tensor per aux layer."""
        if self.fc_norm is not None:
            rows = [norm(each) for norm, each in zip(self.fc_norm, rows, strict=True)]
        joined = torch.cat([*rows], dim=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def run(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that `lm_head` reads, and the hidden rows of the tokens after these."""
        for i, layer in enumerate(self.layers):
            hidden = layer.run(embedded, hidden, angles, attend, i)  # type: ignore[operator]
        normed = self.norm(hidden)
        return normed, normed if self.shape.norm_output else hidden

    def names(self) -> dict[str, tuple[str, slice]]:
        """Return each published tensor's name with the parameter, and its rows there."""
        config, dim = self.shape.config, self.shape.head_dim
        q, kv = config.num_attention_heads * dim, self.shape.kv_heads * dim
        wide = config.intermediate_size
        joint = {
            "qkv_proj": {
                "self_attn.q_proj": slice(0, q),
                "self_attn.k_proj": slice(q, q + kv),
                "self_attn.v_proj": slice(q + kv, q + 2 * kv),
            },
            "gate_up_proj": {"mlp.gate_proj": slice(0, wide), "mlp.up_proj": slice(wide, 2 * wide)},
            "o_proj": {"self_attn.o_proj": slice(None)},
            "down_proj": {"mlp.down_proj": slice(None)},
            "q_norm": {"self_attn.q_norm": slice(None)},
            "k_norm": {"self_attn.k_norm": slice(None)},
        }
        found = {}
        for name, _ in self.named_parameters():
            module, _, kind = name.rpartition(".")
            above, _, own = module.rpartition(".")
            if own not in joint:
                found[name] = (name, slice(None))
            for published, rows in joint.get(own, {}).items():
                found[f"{above}.{published}.{kind}"] = (name, rows)
        return found

    def expected(self) -> dict[str, list[int]]:
        """Return the shape of each published tensor."""
        parameters = dict(self.named_parameters())
        return {
            published: list(parameters[name][rows].shape)
            for published, (name, rows) in self.names().items()
        }

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the shapes `expected`, by their published names."""
        parameters = dict(self.named_parameters())
        for published, (name, rows) in self.names().items():
            parameters[name][rows] = tensors[published].to(parameters[name].dtype)

    def published(self) -> dict[str, Tensor]:
        """Return the weights by their published names."""
        parameters = dict(self.named_parameters())
        return {
            published: parameters[name][rows].detach().clone()
            for published, (name, rows) in self.names().items()
        }


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads [..., heads, dim] by halves; cosines and sines are [..., dim]."""
    cosines, sines = angles
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosines.unsqueeze(-2) + turned * sines.unsqueeze(-2)


def rotary_angles(config: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, dim] of a configuration's rotary embedding, in float32."""
    with torch.no_grad():
        places = torch.arange(length)[None]
        cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), places)
    return cosines[0], sines[0]
