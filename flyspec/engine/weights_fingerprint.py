"""What tells a model's weights from all others: a digest of its checkpoint's files.

Replicas with other weights give other text, however alike their shapes are. A digest of all that is
in the files takes about a second a gigabyte and core, so it is made beside the loading.
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
"""What a configuration says of its origin, and of the data type, which is told as it is served."""
_SHA256 = re.compile("[0-9a-f]{64}")


@contextmanager
def fingerprint_beside(checkpoint: Checkpoint, wanted: bool) -> Iterator[Callable[[], str]]:
    """While a checkpoint is loaded, make the fingerprint of its weights: ask for it afterwards.

    It is 32 hexadecimal digits, or empty if it is not wanted. Asking may raise `OSError` and
    `ValueError`.
    """
    if not wanted:
        yield lambda: ""
        return
    with ThreadPoolExecutor(1, "weights_fingerprint") as pool:
        # A hub's files may come only with the loading.
        early = all(file.is_file() for file in checkpoint.files())
        made = pool.submit(weights_fingerprint, checkpoint) if early else None
        yield lambda: made.result() if made else weights_fingerprint(checkpoint)


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Of the names and contents of a checkpoint's files, and of the configuration beside them."""
    files = checkpoint.files()
    with ThreadPoolExecutor(available_cores(), "weights_fingerprint") as pool:
        digests = list(pool.map(_sha256, files))
    whole = hashlib.sha256(_config(checkpoint.weights.parent / _CONFIG))
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"\n{file.name} {digest}".encode())
    return whole.hexdigest()[:32]


def _sha256(path: Path) -> str:
    """Of a file's contents. A hub's cache has recorded it: its blobs are named so."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _config(path: Path) -> bytes:
    config = json.loads(path.read_bytes())
    told = {name: value for name, value in config.items() if name not in _NOT_ARITHMETIC}
    return json.dumps(told, sort_keys=True).encode()
