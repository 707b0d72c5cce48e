"""A datastore of the Python standard library, built once for each target's tokenizer.

Without the files that are held out from the bundled models, so that these can be drafted fairly.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flyspec.cli.datastore import build_datastore
from flyspec.cli.program import say
from flyspec.datastore.store import FACTS
from flyspec_lab.python_source import is_held_out, python_files, python_version

FOLDER = Path("build/datastores")


def library_datastore(model: str) -> Path:
    """Return the directory of the datastore for a target's tokens, building it if need be."""
    key = hashlib.sha256(f"{python_version()} {model}".encode()).hexdigest()[:12]
    path = FOLDER / f"python-{key}"
    if not (path / FACTS).is_file():
        say(f"building a datastore of the Python standard library in {path}")
        texts = python_files(lambda name: not is_held_out(name))
        build_datastore(path, iter(texts.values()), model)
    return path
