"""Identifies a model's weights by a digest of its checkpoint's files.

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
from pathlib import Path

from flyspec.engine.checkpoint import Checkpoint
from flyspec.process import available_cores

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
        early = all(file.is_file() for file in checkpoint.files())
        made = pool.submit(weights_fingerprint, checkpoint) if early else None
        yield lambda: made.result() if made else weights_fingerprint(checkpoint)


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Hash the names and contents of a checkpoint's files and the configuration beside them."""
    files = checkpoint.files()
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
