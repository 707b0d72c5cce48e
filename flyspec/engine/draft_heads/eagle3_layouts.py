"""Reads an EAGLE-3 head from a directory in either of the published layouts.

SpecForge's and SGLang's: config.json of a Llama with the architecture `LlamaForCausalLMEagle3` and
`draft_vocab_size`; tensors `fc`, `midlayer.*` (or `layers.0.*`), `norm`, `lm_head`, `d2t`, `t2d`
and perhaps `embed_tokens`. `speculators`': `speculators_model_type` eagle3, the layer's
configuration as `transformer_layer_config`, tensors `layers.0.*`. Others write `model.` before all.

Layers of the target: `eagle_config.eagle_aux_hidden_state_layer_ids` of SGLang's layout names the
layers whose *outputs* are read, from 0: SGLang adds one to them (`set_eagle3_layers_to_capture`),
as its layers hand over their inputs. `eagle_aux_hidden_state_layer_ids` of speculators, at the top,
names the layers whose *inputs* are read: vLLM takes the ids as they are and keeps the row that
enters the layer (`aux_hidden_state_layers`). Ours number the outputs from 1, and the embeddings 0,
so that inputs keep their number and outputs get one more. Without ids, both read the inputs of
layers 2, L / 2 and L - 3.

`d2t` holds, for each token that can be drafted, the target's id less its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from flyspec.engine.draft_heads.eagle3 import Eagle3Head
from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, Eagle3Shape
from flyspec.engine.draft_heads.files import HeadFiles, fingerprint_of
from flyspec.engine.draft_heads.native_eagle3 import NativeEagle3Head, difference, unsupported
from flyspec.engine.draft_heads.stepping import SteppingHead
from flyspec.engine.draft_heads.target import HeadTarget, computing_type
from flyspec.engine.native.library import find

log = logging.getLogger(__name__)

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""SpecForge's and SGLang's, in which `flyspec heads train` writes."""
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
_LAYER = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """True if a head's config.json declares an EAGLE-3 head."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    return any(name in _ARCHITECTURES for name in config.get("architectures") or ())


class Eagle3Weights(NamedTuple):
    """A head as it is stored: `tensors` by the names of `Eagle3Network.names`.

    The embedding, `embed_tokens.weight`, and `lm_head.weight` are missing where they are the
    target's. `draft_token_ids`: the target's ids of the tokens that can be drafted; None for all.
    """

    shape: Eagle3Shape
    tensors: dict[str, Tensor]
    draft_token_ids: Tensor | None


def read_eagle3(files: HeadFiles, target: HeadTarget, num_slots: int) -> SteppingHead:
    """Load a head for a target, natively where that can be; the log says why not.

    Raises `ConfigError` that says what does not fit.
    """
    shape, tensors, ids = read_weights(files, target)
    fingerprint = fingerprint_of(tensors, {**files.config, "flyspec_training": None})
    count = sum(each.numel() for name, each in tensors.items() if name != "d2t")
    tensors.setdefault("lm_head.weight", target.lm_head)
    dtype = computing_type(target, count)
    with torch.device("meta"):
        network = Eagle3Network(shape)
    network = network.to_empty(device=target.device).to(dtype)
    network.load_published(tensors)
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    head = Eagle3Head(
        network, embedding.to(target.device, dtype), None if ids is None else ids.to(target.device),
        num_slots, target.context_length, count, fingerprint,
    )  # fmt: skip
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return head
    library = find()
    reason = library if isinstance(library, str) else unsupported(network)
    if reason or isinstance(library, str):
        log.info("head %s: no native step: %s", files.folder.name, reason)
        return head
    native = NativeEagle3Head(
        network.float(), embedding.to(torch.bfloat16), ids, num_slots, target.context_length,
        count, fingerprint, library,
    )  # fmt: skip
    reason = difference(native, head)
    log.info("head %s: %s", files.folder.name, f"no native step: {reason}" if reason else "native")
    return head if reason else native


def read_weights(files: HeadFiles, target: HeadTarget) -> Eagle3Weights:
    """Read and check a head's files. Raises `ConfigError`."""
    shape = _shape(files, target)
    with torch.device("meta"):
        expected = Eagle3Network(shape).expected()
    config = shape.config
    own = [target.vocab_size, config.hidden_size]
    if _is_stored(files, "embed_tokens.weight"):
        expected["embed_tokens.weight"] = own
    elif config.hidden_size != target.hidden_size:
        raise files.wrong(
            f"its hidden size is {config.hidden_size} and the target's {target.hidden_size}, so it "
            f"needs an embedding of its own: embed_tokens.weight {own} is missing"
        )
    ids = None
    if shape.draft_vocab_size < target.vocab_size:
        expected["d2t"] = [shape.draft_vocab_size]
    elif not _is_stored(files, "lm_head.weight") and config.hidden_size == target.hidden_size:
        del expected["lm_head.weight"]
    tensors = files.read(expected, _names)
    if "d2t" in tensors:
        ids = _draft_token_ids(files, tensors["d2t"], target.vocab_size)
    return Eagle3Weights(shape, tensors, ids)


def _names(name: str) -> list[str]:
    """Return the names that a published tensor may have."""
    found = [name.replace("layers.0.", "midlayer.", 1)] if name.startswith("layers.0.") else []
    found.append(name)
    return [*found, *(f"model.{each}" for each in found)]


def _is_stored(files: HeadFiles, name: str) -> bool:
    return any(each in files.places for each in _names(name))


def _shape(files: HeadFiles, target: HeadTarget) -> Eagle3Shape:
    whole = files.config
    speculators = "speculators_model_type" in whole
    layer = whole.get("transformer_layer_config") if speculators else whole
    if not isinstance(layer, dict):
        raise files.wrong("config.json has no transformer_layer_config")
    if whole.get("quantization_config"):
        raise files.wrong("its weights are quantized, which is not supported; use a bf16 one")
    kind = layer.get("model_type", "llama")
    if kind not in _LAYER:
        raise files.wrong(f"its layer is of type {kind}; known are {', '.join(_LAYER)}")
    for name in _SIZES:
        files.number(layer, name)
    if layer.get("hidden_act", "silu") != "silu":
        raise files.wrong(f"its activation is {layer['hidden_act']}; only silu is known")
    read = {key: value for key, value in layer.items() if key not in ("architectures", "dtype")}
    try:
        config = _LAYER[kind](**read)
    except Exception as error:
        raise files.wrong(f"config.json cannot be read: {error}") from error
    if config.num_attention_heads % config.num_key_value_heads:
        raise files.wrong(
            f"{config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} KV heads"
        )
    if not hasattr(config, "mlp_bias"):
        config.mlp_bias = False
    hidden = whole.get("target_hidden_size") or config.hidden_size
    for what, given, own in (
        ("hidden size", hidden, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if given != own:
            raise files.wrong(
                f"it is for a target with {what} {given}; {target.name} has {what} {own}"
            )
    size = whole.get("draft_vocab_size") or config.vocab_size
    if not 0 < size <= target.vocab_size:
        raise files.wrong(f"draft_vocab_size is {size}; the target has {target.vocab_size} tokens")
    return Eagle3Shape(
        config,
        hidden,
        _layers(files, target, speculators),
        size,
        qk_norm=kind == "qwen3",
        norm_before_residual=bool(whole.get("norm_before_residual")),
        norm_before_fc=bool(whole.get("norm_before_fc")),
        fc_norm=bool(whole.get("fc_norm")),
        norm_output=bool(whole.get("norm_output")),
        fc_bias=bool(whole.get("bias")),
    )


def _layers(files: HeadFiles, target: HeadTarget, speculators: bool) -> tuple[int, ...]:
    """Return the layers that the head reads, numbered as in `Step.hidden_layers`."""
    count = target.num_layers
    nested = (files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = files.config.get("eagle_aux_hidden_state_layer_ids")
    if nested and not speculators:
        layers = [layer + 1 for layer in nested]
    else:
        layers = top or [2, count // 2, count - 3]
    for layer in layers:
        # The last layer's own output, before the final norm, is not among the rows of a step.
        if not 0 <= layer < count:
            raise files.wrong(
                f"it reads the outputs of the target's layers {', '.join(map(str, layers))}, "
                f"counted from 1; {target.name} has {count} layers, so 0 to {count - 1} can be read"
            )
    return tuple(layers)


def _draft_token_ids(files: HeadFiles, offsets: Tensor, vocab_size: int) -> Tensor:
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(ids.unique()) < len(ids):
        raise files.wrong(
            f"d2t does not map its tokens to different ones of the target's {vocab_size}"
        )
    return ids
