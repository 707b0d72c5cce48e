"""`make imports` refuses import cycles, with their lines, in a package made for the test."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"


def lint(folder: Path, contract: str, **modules: str) -> tuple[bool, str]:
    """Return whether a package `planted` of these modules keeps a contract, and the output."""
    package = folder / "planted"
    package.mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)
    config = folder / "linter.toml"
    config.write_text(
        "[tool.importlinter]\n"
        'root_packages = ["planted"]\n'
        'contract_types = ["no_circles: tests.contract.import_circles.NoCirclesContract"]\n'
        f'[[tool.importlinter.contracts]]\nname = "planted"\n{contract}\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--config", str(config), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "COLUMNS": "200"},
    )
    return done.returncode == 0, done.stdout + done.stderr


NO_CIRCLES = 'type = "no_circles"'


@pytest.mark.parametrize(
    "closing",
    [
        "def late():\n    from planted import first",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.first import x",
    ],
    ids=["late", "for types only"],
)
def test_a_circle_is_refused_with_its_modules_and_lines(tmp_path: Path, closing: str) -> None:
    kept, said = lint(
        tmp_path,
        NO_CIRCLES,
        first="import planted.second\nimport planted.leaf",
        second="\nfrom planted import third",
        third=closing,
        leaf="import json",
    )
    assert not kept
    assert "A circle of 3 modules: planted.first, planted.second, planted.third" in said
    assert "planted.second -> planted.third (l.2)" in said
    assert f"planted.third -> planted.first (l.{len(closing.splitlines())})" in said
    assert "leaf" not in said


def test_every_package_of_the_product_is_looked_at() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = {
        path.parent.name for where in ("*", "lab/*") for path in ROOT.glob(f"{where}/__init__.py")
    } - {"tests"}
    assert set(settings["importlinter"]["root_packages"]) == packages
    assert set(settings["mypy"]["packages"]) == packages | {"k8s", "docs"}  # namespace packages
