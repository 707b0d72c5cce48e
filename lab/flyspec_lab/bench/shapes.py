"""Models for benchmarks: shapes of Llama models with random weights, and layers without effect."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from flyspec.engine.loading import LoadedModel
from flyspec.errors import ConfigError
from flyspec.values.admin import ModelInfo, TokenizerBundle

_LOGIT_DEVIATION = 4.0
"""Standard deviation of the logits of random weights. About half of the positions are then as
uncertain as the rule fly requires (normalized entropy about 1 - 16 / (2 log |V|), 0.32 at 128,256
tokens); with initialised weights all of them would be."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama model. `tied`: the output layer is the embeddings."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    context_length: int = 4096
    tied: bool = True

    def config(self, **known: Any) -> LlamaConfig:
        """Return transformers' configuration, in bfloat16, with `known` besides."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context_length,
            tie_word_embeddings=self.tied,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
            **known,
        )


SHAPES: Mapping[str, ModelShape] = {
    # Meta's Llama 3.2 1B, 3.1 8B, 70B and 405B (config.json), except for the context length.
    "llama-1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128_256),
    "llama-8b": ModelShape(32, 4096, 14_336, 32, 8, 128, 128_256, tied=False),
    "llama-70b": ModelShape(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
    "llama-405b": ModelShape(126, 16_384, 53_248, 128, 8, 128, 128_256, tied=False),
    "tiny": ModelShape(2, 64, 128, 4, 2, 16, 6_000, 512),
}
"""Shapes by name. `tiny` is for tests; it, too, has more tokens than the bundled tokenizer."""


def shape_named(flag: str, name: str) -> ModelShape:
    """Return a shape by its name. Raises `ConfigError` that names the flag."""
    if name not in SHAPES:
        raise ConfigError(f"{flag} {name}: must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def random_model(
    name: str,
    config: LlamaConfig,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> LoadedModel:
    """Build a model with random weights on a device, without files and without a tokenizer.

    Weights differ between kinds of devices. Raises `ConfigError` if the device has too little
    memory.
    """
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(_LOGIT_DEVIATION if key == "model.norm.weight" else 1.0)
                else:  # its products with normed hidden states have deviation 1
                    parameter.normal_().mul_(float(parameter.shape[-1]) ** -0.5)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"shape {name}: does not fit on {device}; use a smaller one") from error
    info = ModelInfo(
        name,
        "",
        config.vocab_size,
        config.max_position_embeddings,
        str(dtype).removeprefix("torch."),
        str(device),
        model.num_parameters(),
    )
    return LoadedModel(model, info, TokenizerBundle(b"", "", (), (), None, "", "{}"))


def write_pair(
    shape: str,
    draft_layers: int,
    noise: float,
    folder: Path,
    tokenizer_of: Path,
    device: torch.device | str = "cpu",
) -> tuple[Path, Path]:
    """Write a target of a shape with random weights, and a draft model for it; return both.

    The draft model is the target's first layers, behind which the target's change nothing; `noise`,
    relative to its weights, is added to its output layer, so that it errs now and then. Both have
    another model's tokenizer, and may have more ids than that; those stand for no text. The weights
    are made on `device`, which takes a GPU seconds for billions.
    """
    ends = AutoConfig.from_pretrained(tokenizer_of).to_dict()
    known = {name: ends[name] for name in ends if name.endswith("_token_id")}
    sizes = SHAPES[shape]
    config = replace(sizes, num_layers=draft_layers).config(**known)
    model = random_model(shape, config, torch.device(device)).model
    base = _write(model, folder / "base", tokenizer_of)
    output = model.get_output_embeddings().weight.data
    output += noise * output.std() * torch.randn_like(output)
    draft = _write(model, folder / "draft", tokenizer_of)
    del model, output
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the services need the memory
    return pad_layers(base, folder / "target", sizes.num_layers - draft_layers), draft


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
