"""Facts of a machine that results depend on: processor, accelerator, versions."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("flyspec", "torch", "transformers", "numpy", "grpcio")


def this_machine() -> dict[str, Any]:
    import torch

    path = Path("/proc/cpuinfo")
    known = re.search(r"model name\s*:\s*(.+)", path.read_text() if path.is_file() else "")
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": known[1] if known else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "versions": versions,
    }
