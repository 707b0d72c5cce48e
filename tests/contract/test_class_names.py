"""No two classes of the product have the same name."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_classes_have_one_name() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    places = defaultdict(set)
    folders = [ROOT / ("lab" if name == "flyspec_lab" else "") / name for name in packages]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        if path.is_relative_to(ROOT / "flyspec" / "v1"):
            continue  # generated
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    again = [f"{name}: {sorted(found)}" for name, found in places.items() if len(found) > 1]
    assert not again, "\n".join(again)
