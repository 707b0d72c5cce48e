"""A GGUF file: its metadata, its tokenizer's parts, the fingerprint of its tensors.

Read with the package gguf (the format: github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.process import available_cores

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NOT_ARITHMETIC = ("general.", "tokenizer.", "split.", "GGUF.")
"""Beginnings of keys for a file's origin and form, and for the tokenizer, which has its own
fingerprint."""


class GgufFile:
    """A model in one GGUF file, or in several parts of which `path` is the first.

    Raises `ConfigError` for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._readers = [GGUFReader(part) for part in parts_of(path)]
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                f"--model {path}: cannot be read as GGUF ({error}); was the download interrupted?"
            ) from None
        self._fields = self._readers[0].fields
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; arrays are lists."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the file's architecture, such as `block_count`."""
        return self.get(f"{self.architecture}.{key}", default)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates by name; the default one has an empty name."""
        first = "tokenizer.chat_template"
        return {
            key.removeprefix(first).removeprefix("."): str(self.get(key))
            for key in self._fields
            if key == first or key.startswith(first + ".")
        }

    @property
    def tensor_types(self) -> str:
        """The types of its tensors, the one with most elements first."""
        sizes: Counter[str] = Counter()
        for tensor in self._tensors():
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        return ", ".join(name for name, _ in sizes.most_common())

    def _tensors(self) -> Iterator[Any]:
        for reader in self._readers:
            yield from reader.tensors

    def cache_elements_per_token(self) -> int:
        """Return how many numbers keys and values of one token are, over all layers."""
        layers = int(self.own("block_count"))
        heads = int(self.own("attention.head_count", 1) or 1)
        width = int(self.own("embedding_length")) // heads
        kv_heads = self.own("attention.head_count_kv", heads)
        total = sum(kv_heads) if isinstance(kv_heads, list) else layers * int(kv_heads)
        keys = int(self.own("attention.key_length", width))
        return total * (keys + int(self.own("attention.value_length", width)))

    def weights_fingerprint(self) -> str:
        """Hash what determines the model's logits: 32 hexadecimal digits.

        That is names, shapes, types and contents of the tensors, and the keys of its architecture;
        not the file's name, its description or how it is split.
        """
        tensors = sorted(self._tensors(), key=lambda tensor: tensor.name)
        with ThreadPoolExecutor(available_cores(), "weights_fingerprint") as pool:
            digests = list(pool.map(_sha256, tensors))
        whole = hashlib.sha256(self.architecture.encode())
        for key in sorted(self._fields):
            if not key.startswith(_NOT_ARITHMETIC):
                whole.update(f"\n{key} {self.get(key)}".encode())
        for tensor, digest in zip(tensors, digests, strict=True):
            shape = "x".join(map(str, tensor.shape))
            whole.update(f"\n{tensor.name} {tensor.tensor_type.name} {shape} {digest}".encode())
        return whole.hexdigest()[:32]


def _sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.data).hexdigest()


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, given its only one or the first of its parts.

    llama.cpp names the parts NAME-00001-of-00003.gguf and so on. Raises `ConfigError` for another
    part than the first.
    """
    found = _PART.search(path.name)
    if found is None:
        return [path]
    number, count = int(found[1]), int(found[2])
    parts = [
        path.with_name(f"{path.name[: found.start()]}-{i:05d}-of-{count:05d}.gguf")
        for i in range(1, count + 1)
    ]
    if number != 1:
        raise ConfigError(
            f"--model {path}: is part {number} of {count}; give the first, {parts[0]}"
        )
    return parts
