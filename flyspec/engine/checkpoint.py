"""A checkpoint: its files, the size of its weights according to their headers, their digest.

Replicas with different weights generate different text, however alike their shapes. Hashing the
files takes about a second per gigabyte and core, so it runs while the model loads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from flyspec.engine.devices import AnyDevice, ElementType, NamedType, stored_type
from flyspec.model_files import safetensors_header, weight_files
from flyspec.process import available_cores

_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Converted to the data type that the model runs in; others stay as they are."""


class Checkpoint(NamedTuple):
    """A model to be loaded, and how.

    `weights` is a safetensors file, or the index of several. `tensor_parallel_size` devices share
    the model.
    """

    name: str
    config: Any
    dtype: ElementType
    device: AnyDevice
    context_length: int
    tensor_parallel_size: int
    weights: Path

    def loaded_bytes(self) -> int | None:
        """Return the bytes of all weights once they are loaded; None if unknown.

        If files are not downloaded yet, the size is computed from the index.
        """
        try:
            files = weight_files(self.weights)
            if all(file.is_file() for file in files):
                return sum(n for file in files for _, n in loaded_sizes(file, self.dtype))
            index = json.loads(self.weights.read_text())
            stored = NamedType(stored_type(self.config)).itemsize
            return int(index["metadata"]["total_size"]) * self.dtype.itemsize // stored
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # loading reports what is wrong


def loaded_sizes(path: Path, dtype: ElementType) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a safetensors file, each with its bytes once it is loaded in a type.

    Reads the header alone. Raises `OSError` and `ValueError`.
    """
    for name, tensor in safetensors_header(path).items():
        begin, end = tensor["data_offsets"]
        floats = tensor["dtype"] in _FLOATS
        yield name, prod(tensor["shape"]) * dtype.itemsize if floats else end - begin


_CONFIG = "config.json"
_NOT_ARITHMETIC = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Configuration keys for the origin, and for the data type, which is reported as served."""
_SHA256 = re.compile("[0-9a-f]{64}")


@contextmanager
def fingerprint_beside(checkpoint: Checkpoint, wanted: bool) -> Iterator[Callable[[], str]]:
    """Compute the fingerprint of a checkpoint's weights while it loads; yield a call to get it.

    It is 32 hexadecimal digits, or empty if not `wanted`. The call, to be made after loading, may
    raise `OSError` and `ValueError`.
    """
    if not wanted:
        yield lambda: ""
        return
    with ThreadPoolExecutor(1, "weights_fingerprint") as pool:
        # Files from a hub may be downloaded only by loading.
        early = all(file.is_file() for file in weight_files(checkpoint.weights))
        made = pool.submit(weights_fingerprint, checkpoint) if early else None
        yield lambda: made.result() if made else weights_fingerprint(checkpoint)


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Hash the names and contents of a checkpoint's files and the configuration beside them."""
    files = weight_files(checkpoint.weights)
    with ThreadPoolExecutor(available_cores(), "weights_fingerprint") as pool:
        digests = list(pool.map(_sha256, files))
    whole = hashlib.sha256(_config(checkpoint.weights.parent / _CONFIG))
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"\n{file.name} {digest}".encode())
    return whole.hexdigest()[:32]


def _sha256(path: Path) -> str:
    """Hash a file's contents. Blobs in a hub's cache are already named by their hash."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _config(path: Path) -> bytes:
    config = json.loads(path.read_bytes())
    told = {name: value for name, value in config.items() if name not in _NOT_ARITHMETIC}
    return json.dumps(told, sort_keys=True).encode()
