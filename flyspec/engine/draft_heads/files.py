"""A head's directory: its configuration, and its tensors by name; what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flyspec.errors import ConfigError
from flyspec.model_files import CONFIG, INDEX, WEIGHTS, find_weights, weight_files

_SHOWN = 4
"""Tensors that an error names; it counts the others."""


class HeadFiles:
    """The files of a head. All errors are `ConfigError`s that name the directory.

    `weights` are the names under which the weights may lie, one file or an index of several.
    """

    def __init__(self, folder: Path, weights: Sequence[str] = (INDEX, WEIGHTS)) -> None:
        self.folder = folder
        self._weights = weights
        self._places: dict[str, Path] | None = None
        try:
            config = json.loads((folder / CONFIG).read_text())
        except OSError as error:
            raise self.wrong(
                f"{CONFIG} cannot be read: {error.strerror}; give the directory of a head"
            ) from None
        except ValueError as error:
            raise self.wrong(f"{CONFIG} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise self.wrong(f"{CONFIG} is not a JSON object")
        self.config: Mapping[str, Any] = config

    def wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"head {self.folder}: {problem}")

    def number(self, config: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """Return a positive integer of a configuration."""
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(f"{CONFIG} has {name} {value!r}; it must be an integer of at least 1")
        return value

    @property
    def places(self) -> Mapping[str, Path]:
        """The file of each tensor."""
        if self._places is None:
            self._places = {}
            for path in self._files():
                try:
                    with safe_open(path, "pt") as file:
                        self._places.update(dict.fromkeys(file.keys(), path))
                except (OSError, SafetensorError) as error:
                    raise self.wrong(f"{path.name} is not a safetensors file: {error}") from None
        return self._places

    def _files(self) -> list[Path]:
        found = next((self.folder / n for n in self._weights if (self.folder / n).is_file()), None)
        if found is None:
            others = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".pt", ".bin"))
            more = f", only {others[0]}, which could run code" if others else ""
            raise self.wrong(
                f"no {' and no '.join(self._weights)} there{more}; save its tensors as safetensors"
            )
        return self._listed(found)

    def _listed(self, found: Path) -> list[Path]:
        find: Callable[[str], Path | None] = lambda name: found if name == found.name else None  # noqa: E731
        try:
            return weight_files(find_weights(str(self.folder), find, found.name))
        except ConfigError as error:
            raise self.wrong(str(error)) from None

    def read(
        self, expected: Mapping[str, Sequence[int]], names: Callable[[str], Iterable[str]]
    ) -> dict[str, Tensor]:
        """Read the tensors of these shapes; `names` are the ones that each may have in the files.

        Raises `ConfigError` that names those that are missing or have another shape.
        """
        missing, misshapen = [], []
        found: dict[str, Tensor] = {}
        for name, shape in expected.items():
            stored = next((each for each in names(name) if each in self.places), None)
            if stored is None:
                missing.append(f"{next(iter(names(name)))} {[*shape]}")
                continue
            tensor = self.tensor(stored)
            if list(tensor.shape) != [*shape]:
                misshapen.append(f"{stored} is {list(tensor.shape)}, not {[*shape]}")
            elif tensor.is_floating_point() and not tensor.isfinite().all():
                misshapen.append(f"{stored} is not finite")
            found[name] = tensor
        if missing:
            raise self.wrong(
                f"{len(missing)} of {len(expected)} tensors are missing: {_some(missing)}"
            )
        if misshapen:
            raise self.wrong(f"wrong tensors: {_some(misshapen)}")
        return found

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, which must be there."""
        with safe_open(self.places[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _some(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def fingerprint_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Hash weights and what else decides what a head drafts: 32 hexadecimal digits."""
    whole = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"\n{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()[:32]
