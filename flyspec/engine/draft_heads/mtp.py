"""A target's own multi-token prediction (MTP) layer as a head (DeepSeek-V3, arXiv 2412.19437).

It reads [embedding of the next token ; hidden row], both normalised, through a projection and a
decoder layer of the target's own kind, which is transformers' module. Embedding and output layer
are the target's. It drafts the first token from the target's row after the final norm, and each
later one from its own row, as vLLM runs it. Where there are several layers, trained for one token
each, the first drafts all.

Layouts. DeepSeek-V3's, and GLM-4.5's: `model.layers.L.` of the first layer L after the target's
own, with `enorm`, `hnorm`, `eh_proj`, the decoder layer and `shared_head.norm`; copies of the
embedding and of the output layer (`embed_tokens`, `shared_head.head`) are left out. Its own row is
the one before the norm. Qwen3-Next's and Qwen3.5's: `mtp.fc`, `mtp.pre_fc_norm_embedding`,
`mtp.pre_fc_norm_hidden`, `mtp.layers.0.`, `mtp.norm`; its own row is the one after the norm.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

from flyspec.engine.draft_heads.files import HeadFiles, fingerprint_of
from flyspec.engine.draft_heads.stepping import Packed, Piece, SteppingHead
from flyspec.engine.draft_heads.target import HeadTarget, computing_type

MAX_TOKENS = 16
_ATTENTION = "flyspec_mtp"


@dataclass(frozen=True)
class MtpLayout:
    """Names of a published layout's tensors, `layer` those of the decoder layer."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    norm: str
    norm_output: bool


def _deepseek(layer: int) -> MtpLayout:
    own = f"model.layers.{layer}."
    return MtpLayout(
        f"{own}enorm.weight", f"{own}hnorm.weight", f"{own}eh_proj.weight", own,
        f"{own}shared_head.norm.weight", norm_output=False,
    )  # fmt: skip


_QWEN = MtpLayout(
    "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight",
    "mtp.layers.0.", "mtp.norm.weight", norm_output=True,
)  # fmt: skip
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class MtpHead(SteppingHead):
    """An MTP layer with its cache. `model` is a transformers model with that layer alone."""

    kind = "mtp"

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, Tensor],
        layout: MtpLayout,
        target: HeadTarget,
        num_slots: int,
        num_parameters: int,
        fingerprint: str,
    ) -> None:
        super().__init__(target.hidden_size, target.vocab_size, num_slots, MAX_TOKENS)
        self.hidden_layers = (target.num_layers,)
        self.num_parameters, self.fingerprint = num_parameters, fingerprint
        self._dtype, self._device = model.dtype, model.device
        self._layer, self._norm_output = model.layers[0], layout.norm_output

        def norm(name: str) -> nn.Module:
            own: nn.Module = copy.deepcopy(model.norm)
            own.weight.data.copy_(tensors[name])  # type: ignore[operator]
            return own.requires_grad_(False)

        self._embedding_norm = norm(layout.embedding_norm)
        self._hidden_norm = norm(layout.hidden_norm)
        self._norm = norm(layout.norm)
        self._projection = tensors[layout.projection].to(self._device, self._dtype)
        self._embedding = target.embedding.to(self._device, self._dtype)
        self._head = target.lm_head.to(self._device, self._dtype)
        with torch.no_grad():
            places = torch.arange(target.context_length + MAX_TOKENS, device=self._device)[None]
            self._angles = model.rotary_emb(self._projection, places)

    def _read(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        packed = Packed.of(pieces, self._device)
        embedded = self._embedding_norm(self._embedding[packed.token_ids])
        given = [p.hidden[0].to(self._device, self._dtype) for p in pieces]
        hidden = self._hidden_norm(torch.cat(given))
        joined = torch.cat([embedded, hidden], dim=-1) @ self._projection.T
        angles = tuple(table[:, packed.positions] for table in self._angles)
        found = self._layer(
            joined[None],
            position_embeddings=angles,
            attention_mask=None,
            position_ids=packed.positions[None],
            head_rows=packed,
        )
        rows = (found[0] if isinstance(found, tuple) else found)[0][packed.wanted]
        normed = self._norm(rows)
        return normed @ self._head.T, normed if self._norm_output else rows


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    head_rows: Packed,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' layers ask for it; tensors are [1, heads, rows, dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return head_rows.attend(0, q, k, v, scale).unflatten(-1, (query.shape[1], -1))[None], None


@lru_cache(maxsize=1)
def _register() -> None:
    AttentionInterface.register(_ATTENTION, _attend)


def is_mtp(files: HeadFiles) -> bool:
    """True if a directory's configuration, or else its tensors, tell of MTP layers."""
    config = files.config.get("text_config") or files.config
    return any(config.get(key) for key in _KEYS) or any(n.startswith("mtp.") for n in files.places)


def read_mtp(files: HeadFiles, target: HeadTarget, num_slots: int) -> MtpHead:
    """Load the MTP layer in the target's own directory, or one like it. Raises `ConfigError`."""
    _register()
    config = _config(files, target)
    count = config.num_hidden_layers
    layout = _QWEN if any(n.startswith("mtp.") for n in files.places) else _deepseek(count)
    alone = _alone(config)
    kind: Any = MODEL_MAPPING.get(type(alone), None)
    if kind is None:
        raise files.wrong(f"transformers has no model of type {config.model_type}")
    with torch.device("meta"):
        model = kind(alone)
    layer = {
        name.removeprefix("layers.0."): list(tensor.shape)
        for name, tensor in revert_weight_conversion(model, model.state_dict()).items()
        if name.startswith("layers.0.")
    }
    width = target.hidden_size
    expected = {f"{layout.layer}{name}": shape for name, shape in layer.items()}
    expected |= {
        layout.embedding_norm: [width],
        layout.hidden_norm: [width],
        layout.projection: [width, 2 * width],
        layout.norm: [width],
    }
    tensors = files.read(expected, lambda name: [name])
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    state = {f"layers.0.{name}": tensors[f"{layout.layer}{name}"] for name in layer}
    verbosity = get_verbosity()
    set_verbosity_error()  # it would tell of the embedding, which is not there
    try:
        model = kind.from_pretrained(
            None, config=alone, state_dict=state, dtype=computing_type(target, num_parameters)
        )
    except Exception as error:
        raise files.wrong(f"its MTP layer cannot be loaded: {error}") from error
    finally:
        set_verbosity(verbosity)
    model = model.to(target.device).eval().requires_grad_(False)
    model.set_attn_implementation(_ATTENTION)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no float64
    fingerprint = fingerprint_of(tensors, alone.to_diff_dict())
    return MtpHead(model, tensors, layout, target, num_slots, num_parameters, fingerprint)


def _config(files: HeadFiles, target: HeadTarget) -> Any:
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False).get_text_config()
    except Exception as error:
        raise files.wrong(f"config.json cannot be read: {error}") from error
    if getattr(config, "quantization_config", None):
        raise files.wrong("its weights are quantized; convert its MTP layer to bf16")
    for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if getattr(config, name) != own:
            raise files.wrong(
                f"it is for a target with {name} {getattr(config, name)}; {target.name} has {own}"
            )
    return config


def _alone(config: Any) -> Any:
    """Return the configuration of a model with the MTP layer alone: full attention, and experts
    wherever the target's other layers have them."""
    alone = copy.deepcopy(config)
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "num_hidden_layers": 1,
        "pad_token_id": None,
        "vocab_size": 1,
    }.items():
        if getattr(alone, name, None) is not None:
            setattr(alone, name, value)
    return alone
