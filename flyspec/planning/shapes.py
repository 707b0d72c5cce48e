"""A model's shape: the bytes and products of a step, from its configuration.

Sizes of weights come from the headers of safetensors files, if they are there; otherwise from a
model without weights that transformers builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flyspec.engine.cache_size import slot_bytes
from flyspec.engine.checkpoint import loaded_sizes
from flyspec.engine.configuration import read_config
from flyspec.engine.devices import ElementType, NamedType, stored_type
from flyspec.errors import ConfigError
from flyspec.model_files import find_weights, finder, weight_files

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Shape(NamedTuple):
    """Bytes of a model: all weights, those that each step reads, those of routed experts.

    Each row is computed by `expert_share` of the experts. `kv_bytes` are those of a token's keys
    and values, `itemsize` those of a weight.
    """

    weight_bytes: int
    dense_bytes: int
    expert_bytes: int
    expert_share: float
    kv_bytes: int
    itemsize: int

    def read_bytes(self, rows: int) -> float:
        """Return the bytes of weights that a step of so many rows reads, experts as expected."""
        return self.dense_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** rows)

    def flops(self, rows: int) -> float:
        """Return the floating-point operations of a step, attention aside."""
        numbers = (self.dense_bytes + self.expert_bytes * self.expert_share) / self.itemsize
        return 2 * rows * numbers


def shape_of(name: str) -> Shape:
    """Return the shape of a model as stored: a directory's or a hub id's. Raises `ConfigError`."""
    _, config = read_config(name)
    try:
        weights = find_weights(name, finder(name))
    except ConfigError:
        weights = None
    return make_shape(config, NamedType(stored_type(config)), weights)


def make_shape(config: Any, dtype: ElementType, weights: Path | None) -> Shape:
    """Return the shape of a model that runs in a data type; `weights` are its file or index."""
    text = config.get_text_config()
    files = weight_files(weights) if weights is not None else []
    if files and all(file.is_file() for file in files):
        sizes = [size for file in files for size in loaded_sizes(file, dtype)]
    else:
        sizes = [(name, count * dtype.itemsize) for name, count in _parameters(config)]
    tied = getattr(text, "tie_word_embeddings", False)
    if tied:  # files may have the matrix a second time
        sizes = [(name, size) for name, size in sizes if not name.startswith("lm_head.")]
    whole = sum(size for _, size in sizes)
    experts = sum(size for name, size in sizes if ".experts." in name)
    # Of a matrix of embeddings alone, a step reads single rows.
    embeddings = 0 if tied else text.vocab_size * text.hidden_size * dtype.itemsize
    dense = whole - experts - embeddings
    count = next((n for key in _EXPERTS if (n := getattr(text, key, None))), 1)
    share = (getattr(text, "num_experts_per_tok", None) or count) / count
    return Shape(whole, dense, experts, share, slot_bytes(config, 1, dtype), dtype.itemsize)


def _parameters(config: Any) -> Iterator[tuple[str, int]]:
    """Yield a model's parameters by name, with their number of elements."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        yield name, parameter.numel()
