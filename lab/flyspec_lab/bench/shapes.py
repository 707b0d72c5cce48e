"""Shapes of Llama models for benchmarks, and random weights for them, in files or on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

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


def fill(name: str, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a parameter in place: norms of ones, or rows whose products with normed hidden states
    have deviation 1. Returns it."""
    if weights.dim() == 1:
        return weights.fill_(_LOGIT_DEVIATION if name == "model.norm.weight" else 1.0)
    return weights.normal_(generator=generator).mul_(float(weights.shape[-1]) ** -0.5)


def random_model(
    name: str,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    context_length: int = 0,
) -> LoadedModel:
    """Build a model with random weights on a device, without files and without a tokenizer.

    `context_length` (0: the shape's) is the longest sequence. Raises `ConfigError` if the device
    has too little memory.
    """
    length = context_length or shape.context_length
    config = replace(shape, context_length=length).config(eos_token_id=None, bos_token_id=None)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                fill(key, parameter)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"shape {name}: does not fit on {device}; use a smaller one") from error
    info = ModelInfo(
        name,
        "",
        shape.vocab_size,
        length,
        str(dtype).removeprefix("torch."),
        str(device),
        model.num_parameters(),
    )
    return LoadedModel(model, info, TokenizerBundle(b"", "", (), (), None, "", "{}"))
