"""A head's view of its target: sizes, and the embedding and output layer that it shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from flyspec.engine.loading import LoadedModel
from flyspec.errors import ConfigError
from flyspec.model_files import find_weights, finder, weight_files


@dataclass(frozen=True, eq=False)
class HeadTarget:
    """A target, as its heads see it.

    `embedding` and `lm_head` are [vocab_size, hidden_size], on the target's device and in its data
    type; they are the same tensor where the target ties them. `config` is its text configuration.
    """

    name: str
    config: Any
    vocab_size: int
    context_length: int
    weights_fingerprint: str
    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel) -> HeadTarget:
        """Return what heads need of a loaded model; call it before the module is dropped.

        The weights are the module's own. Where a tensor-parallel group
        shares them out, this rank reads a copy of its own from the checkpoint. Raises
        `ConfigError`.
        """
        module, info = loaded.model, loaded.info
        config = module.config.get_text_config()
        size = [config.vocab_size, config.hidden_size]
        found: list[Tensor] = []
        for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
            weight = layer.weight.detach()
            if type(weight) is not Tensor or list(weight.shape) != size:
                weight = _read(module, layer).to(module.device, module.dtype)
            found.append(weight)
        embedding, lm_head = found
        return cls(
            info.name, config, len(lm_head), info.context_length, info.weights_fingerprint,
            embedding, lm_head,
        )  # fmt: skip

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def _read(module: Any, layer: Any) -> Tensor:
    """Read a layer's whole weight from the checkpoint; a tied one has the other's name."""
    name = module.name_or_path
    names = [n for n, m in module.named_modules() if m in (layer, module.get_input_embeddings())]
    for path in weight_files(find_weights(name, finder(name))):
        with safe_open(path, "pt") as file:
            known = set(file.keys())
            for wanted in names:
                if f"{wanted}.weight" in known:
                    tensor: Tensor = file.get_tensor(f"{wanted}.weight")
                    return tensor
    raise ConfigError(f"--model {name}: its checkpoint has no tensor {names[-1]}.weight for a head")


_CACHED_BYTES = 1 << 25


def computing_type(target: HeadTarget, num_parameters: int) -> torch.dtype:
    """Return the data type that a head computes in: its target's, but float32 instead of half
    precision for a small one on a CPU, whose caches hold it and where a row then takes less."""
    half = target.dtype.itemsize < 4
    if half and target.device.type == "cpu" and 4 * num_parameters <= _CACHED_BYTES:
        return torch.float32
    return target.dtype
