"""The orchestrator, the client and the draft service without a model start without torch."""

import subprocess
import sys

import pytest

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "numpy", "accelerate", "safetensors"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.server",
        "flyspec.client",
        "flyspec.wire",
        "flyspec.lookup",
        "flyspec.cli.main",
        "draft_service.server",
    ],
)
def test_imports_without_torch(module):
    subprocess.run([sys.executable, "-c", f"{BLOCKER}\nimport {module}"], check=True)
