"""What may be imported where, and that every package is looked at.

The orchestrator, the client and the draft service without a model start without torch; the command
line starts without any service, and without what it measures.
"""

from __future__ import annotations

import subprocess
import sys
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


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "numpy", "accelerate", "safetensors"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
"""


MODULES = (
    "orchestrator.server", "draft_service.server",
    "flyspec.client", "flyspec.wire", "flyspec.lookup", "flyspec.validation",
    "flyspec.rules.resolve",
    "flyspec.cli.main", "flyspec.cli.stack", "flyspec.cli.render",
)  # fmt: skip


def test_imports_without_torch():
    code = f"{BLOCKER}\nimport {', '.join(MODULES)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_imports_neither_services_nor_the_laboratory():
    late = "draft_service", "verify_service", "orchestrator", "flyspec_lab", "torch", "transformers"
    code = f"""
import sys
from flyspec.cli.main import main
for sys.argv in (["flyspec", "--help"], ["flyspec", "generate", "--help"]):
    try:
        main()
    except SystemExit:
        print([m for m in sys.modules if m.startswith({late})], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "[]\n[]\n"
