"""Write what the images install: python image_requirements.py PYPROJECT CONSTRAINTS DIRECTORY.

Writes core.txt (for every service, with the exporter of traces), http.txt (orchestrator),
models.txt (draft and verify) and torch.txt (only torch's version, since it has an index of its
own). Image layers with dependencies are rebuilt only when these files change, not with every change
of pyproject.toml.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path


def main(pyproject: Path, constraints: Path, directory: Path) -> None:
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    torch = re.search(r"^torch==(\S+)$", constraints.read_text(), re.MULTILINE)
    if torch is None:
        raise SystemExit(f"{constraints}: has no line torch==VERSION")
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in {
        "core": [*project["dependencies"], *extras["otlp"]],
        "http": extras["http"],
        "models": [line for line in extras["models"] if not re.match(r"torch\b", line)],
        "torch": [torch[1]],
    }.items():
        path = directory / f"{name}.txt"
        path.write_text("\n".join(lines) + "\n")
        os.utime(path, (0, 0))  # for buildah, a new modification time means a new file


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
