"""Every package of the product is checked by import-linter and mypy."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = {
        path.parent.name for where in ("*", "lab/*") for path in ROOT.glob(f"{where}/__init__.py")
    } - {"tests"}
    assert set(settings["importlinter"]["root_packages"]) == packages
    assert set(settings["mypy"]["packages"]) == packages | {"k8s", "docs"}  # namespace packages
