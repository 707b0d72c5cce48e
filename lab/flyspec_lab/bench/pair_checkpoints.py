"""Checkpoints for benchmarks: with layers that change nothing, or with random weights of a shape.

Written to a temporary directory of the caller's, in Hugging Face format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from flyspec.errors import ConfigError
from flyspec_lab.bench.shapes import ModelShape, fill

CONFIG = "config.json"
_LAYERS = "model.layers."
_ZEROED = ("self_attn.o_proj.", "mlp.down_proj.")
"""The two outputs of a layer to the residual stream."""


def pad_layers(source: Path, target: Path, num_layers: int) -> Path:
    """Write `source` with further layers to `target`; return `target`.

    They are copies of its layers in turn, except that nothing they compute reaches the residual
    stream: the outputs are the same to the bit, but a step costs more. Raises `ConfigError` if
    `source` is not a directory of a decoder with such layers.
    """
    files = _weight_files(source)
    config = json.loads((source / CONFIG).read_text())
    own = config["num_hidden_layers"]
    config["num_hidden_layers"] = own + num_layers
    for name, value in config.items():
        if isinstance(value, list) and name == "layer_types":
            config[name] = [value[i % own] for i in range(own + num_layers)]
    _copy_all_but_weights(source, target)
    (target / CONFIG).write_text(json.dumps(config, indent=2))
    weight_map: dict[str, str] = {}
    padding: dict[str, Tensor] = {}
    for number, file in enumerate(files):
        linked = f"own-{number}.safetensors"
        (target / linked).symlink_to(file.resolve())
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                weight_map[name] = linked
                if name.startswith(_LAYERS):
                    padding |= _copies(name, tensors.get_tensor(name), own, num_layers)
    if num_layers and not any(part in name for name in padding for part in _ZEROED):
        raise ConfigError(f"{source}: has no layers of a kind that can be added")
    if padding:
        save_file(padding, str(target / "padding.safetensors"), {"format": "pt"})
        weight_map |= dict.fromkeys(padding, "padding.safetensors")
    _write_index(target, weight_map)
    return target


def write_random(
    shape: ModelShape,
    target: Path,
    tokenizer_of: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Path:
    """Write a model with random weights and another's tokenizer to `target`; return `target`.

    It may have more ids than the tokenizer; those stand for no text. Everything except
    configuration and weights is copied from `tokenizer_of`. The weights are made on `device`, which
    takes a GPU seconds for billions; those of a seed differ between kinds of devices.
    """
    _copy_all_but_weights(tokenizer_of, target)
    ends = json.loads((tokenizer_of / CONFIG).read_text())
    known = {name: ends[name] for name in ends if name.endswith("_token_id")}
    config = shape.config(**known)
    config.save_pretrained(target)
    with torch.device("meta"):
        names = {
            name: parameter.shape
            for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    weight_map: dict[str, str] = {}
    for file, shard in _shards(names, torch.Generator(device).manual_seed(seed)):
        save_file(shard, str(target / file), {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    _write_index(target, weight_map)
    return target


def _shards(
    names: Mapping[str, torch.Size], generator: torch.Generator
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the file name and tensors of each layer, and of the rest."""
    groups: dict[str, list[str]] = {}
    for name in names:
        part = name.removeprefix(_LAYERS).split(".")[0] if name.startswith(_LAYERS) else "ends"
        groups.setdefault(part, []).append(name)
    for part, members in groups.items():
        tensors = {}
        for name in members:
            made = torch.empty(names[name], dtype=torch.bfloat16, device=generator.device)
            tensors[name] = fill(name, made, generator).cpu()
        yield f"random-{part}.safetensors", tensors


def _copies(name: str, tensor: Tensor, own: int, num_layers: int) -> dict[str, Tensor]:
    """Return the added layers' tensors made from this one."""
    layer, _, rest = name.removeprefix(_LAYERS).partition(".")
    zeroed = rest.startswith(_ZEROED)
    return {
        f"{_LAYERS}{i}.{rest}": torch.zeros_like(tensor) if zeroed else tensor.clone()
        for i in range(own, own + num_layers)
        if i % own == int(layer)
    }


def _weight_files(source: Path) -> list[Path]:
    if not (source / CONFIG).is_file():
        raise ConfigError(f"{source}: layers are added to a directory with a model, not to a name")
    if (source / SAFE_WEIGHTS_NAME).is_file():
        return [source / SAFE_WEIGHTS_NAME]
    index = source / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise ConfigError(f"{source}: has no weights in safetensors format")
    names = json.loads(index.read_text())["weight_map"].values()
    return [source / name for name in sorted(set(names))]


def _copy_all_but_weights(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != CONFIG:
            shutil.copy(file, target / file.name)


def _write_index(target: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
