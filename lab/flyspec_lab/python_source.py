"""The standard library's Python source, which the bundled models are trained on.

Files that are held out from training are those that a hash of their path chooses, so prompts that
the models never saw can be cut from them wherever Python runs. The source is the running
interpreter's, and its version therefore part of what is made of it (`python_version`).
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Callable
from pathlib import Path

# Tables, test suites and their data: not code that anyone wants completed.
_SKIPPED_FOLDERS = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data",
    "__phello__",
}  # fmt: skip
_MAX_FILE = 400_000
HELD_OUT_SHARE = 0.03


def python_version() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def python_files(wanted: Callable[[str], bool] = lambda path: True) -> dict[str, str]:
    """Return the standard library's source by relative path, sorted, of the files wanted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        if not wanted(relative.as_posix()):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old files use another encoding
        if 0 < len(text) <= _MAX_FILE:
            found[relative.as_posix()] = text
    return found


def is_held_out(path: str) -> bool:
    """True if a file is held out from training, by the hash of its path."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32 < HELD_OUT_SHARE
