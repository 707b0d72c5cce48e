"""Memory between runs, as small JSON files in the user's cache directory.

`$XDG_CACHE_HOME/flyspec`, by default `~/.cache/flyspec`. Nothing depends on it: a file that cannot
be read or written counts as forgotten, and the directory may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

MOST_FILES = 64
"""Per kind; the oldest are deleted."""


def recall(kind: str, *key: object) -> Any:
    """Return what was remembered under this key; None if nothing is."""
    try:
        return json.loads(_path(kind, key).read_text())
    except (OSError, ValueError, RuntimeError):
        return None


def remember(kind: str, document: Any, *key: object) -> None:
    """Keep a document under a key, instead of any earlier one."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(kind, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(document, file)
        os.replace(file.name, path)
        kept = sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in kept[MOST_FILES:]:
            old.unlink(missing_ok=True)


def _path(kind: str, key: tuple[object, ...]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:32]
    return Path(base) / "flyspec" / kind / f"{name}.json"
