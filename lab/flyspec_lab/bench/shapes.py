"""Models for benchmarks: shapes of Llama models with random weights, and layers without effect."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from flyspec.errors import ConfigError

_LOGIT_DEVIATION = 4.0
"""Standard deviation of the logits of random weights. About half of the positions are then as
uncertain as the rule fly requires (normalized entropy about 1 - 16 / (2 log |V|), 0.32 at 128,256
tokens); with initialised weights all of them would be."""

_DRAFT_NOISE = 0.05
"""Noise in a random draft model's output layer, relative to its weights."""


_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip


def _llama(*sizes: int, tied: bool = False, context_length: int = 4096) -> dict[str, Any]:
    return {
        **dict(zip(_SIZES, sizes, strict=True)),
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    # Meta's Llama 3.2 1B, 3.1 8B, 70B and 405B (config.json), except for the context length.
    "llama-1b": _llama(16, 2048, 8192, 32, 8, 64, 128_256, tied=True),
    "llama-8b": _llama(32, 4096, 14_336, 32, 8, 128, 128_256),
    "llama-70b": _llama(80, 8192, 28_672, 64, 8, 128, 128_256),
    "llama-405b": _llama(126, 16_384, 53_248, 128, 8, 128, 128_256),
    "tiny": _llama(2, 64, 128, 4, 2, 16, 6_000, tied=True, context_length=512),
}
"""Shapes by name, in the fields of transformers. `tiny` is for tests; it, too, has more tokens than
the bundled tokenizer."""


def config_of(shape: str, **changes: Any) -> LlamaConfig:
    """Return the configuration of a shape, with changes. Raises `ConfigError`."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
    return LlamaConfig(**{**SHAPES[shape], **changes})


def random_model(config: LlamaConfig, device: torch.device | str = "cpu") -> Any:
    """Build a model with random weights in bfloat16 on a device.

    Weights differ between kinds of devices. Raises `ConfigError` if the device has too little
    memory.
    """
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(_LOGIT_DEVIATION if key == "model.norm.weight" else 1.0)
                else:  # its products with normed hidden states have deviation 1
                    parameter.normal_().mul_(float(parameter.shape[-1]) ** -0.5)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--shape: it does not fit on {device}; use a smaller one") from error
    return model


def draft_layers(shape: str) -> int:
    """Return the number of layers of a shape's draft model, an eighth of the target's."""
    return max(1, int(config_of(shape).num_hidden_layers) // 8)


def write_pair(
    shape: str, folder: Path, tokenizer_of: Path, device: torch.device | str = "cpu"
) -> tuple[Path, Path]:
    """Write a target of a shape with random weights, and a draft model for it; return both.

    The draft model is the target's first layers (`draft_layers`), behind which the target's change
    nothing; a little noise in its output layer makes it err now and then. Both have
    another model's tokenizer, and may have more ids than that; those stand for no text. The weights
    are made on `device`, which takes a GPU seconds for billions.
    """
    ends = AutoConfig.from_pretrained(tokenizer_of).to_dict()
    known = {name: ends[name] for name in ends if name.endswith("_token_id")}
    model = random_model(config_of(shape, num_hidden_layers=draft_layers(shape), **known), device)
    base = _write(model, folder / "base", tokenizer_of)
    output = model.get_output_embeddings().weight.data
    output += _DRAFT_NOISE * output.std() * torch.randn_like(output)
    draft = _write(model, folder / "draft", tokenizer_of)
    del model, output
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the services need the memory
    added = SHAPES[shape]["num_hidden_layers"] - draft_layers(shape)
    return pad_layers(base, folder / "target", added), draft


def pad_layers(source: Path, target: Path, num_layers: int) -> Path:
    """Write `source` with further layers to `target`; return `target`.

    They are copies of its layers in turn, except that nothing they compute reaches the residual
    stream: the outputs are the same to the bit, but a step costs more. Raises `ConfigError` if
    `source` is not a directory of a decoder with such layers.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source}: layers are added to a directory with a model, not to a name")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True)
    layers, own = model.model.layers, model.config.num_hidden_layers
    for number in range(num_layers):
        layer = copy.deepcopy(layers[number % own])
        try:
            ends = layer.self_attn.o_proj, layer.mlp.down_proj
        except AttributeError:
            raise ConfigError(f"{source}: has no layers of a kind that can be added") from None
        for parameter in (p for end in ends for p in end.parameters()):
            parameter.data.zero_()
        layers.append(layer)
    model.config.num_hidden_layers = own + num_layers
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kinds[i % own] for i in range(own + num_layers)]
    return _write(model, target, source)


def _write(model: Any, target: Path, rest_of: Path) -> Path:
    """Write a model, and everything of another's directory except configuration and weights."""
    model.save_pretrained(target)
    for file in rest_of.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, target / file.name)
    return target
