"""Writes what the images install: python image_requirements.py PYPROJECT CONSTRAINTS DIRECTORY.

The image's layers of dependencies are rebuilt only when these files change, and not with every
line of pyproject.toml: core.txt (every service, with the
exporter of traces), models.txt (draft and verify), torch.txt (the
version of torch alone, since it comes from an index of its own).
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path


def main(pyproject: Path, constraints: Path, directory: Path) -> None:
    """Write the three files."""
    project = tomllib.loads(pyproject.read_text())["project"]
    models = project["optional-dependencies"]["models"]
    torch = re.search(r"^torch==(\S+)$", constraints.read_text(), re.MULTILINE)
    if torch is None:
        raise SystemExit(f"{constraints}: has no line torch==VERSION")
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in {
        "core": [*project["dependencies"], *project["optional-dependencies"]["otlp"]],
        "models": [m for m in models if not re.match(r"torch\b", m)],
        "torch": [torch[1]],
    }.items():
        path = directory / f"{name}.txt"
        path.write_text("\n".join(lines) + "\n")
        os.utime(path, (0, 0))  # buildah takes a file with another time for another file


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
