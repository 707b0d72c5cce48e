"""Facts of a machine that results depend on: processor, instruction sets, versions."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

_RELEVANT = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16",
             "asimd", "bf16", "sve", "i8mm")  # fmt: skip
"""Instruction sets for matrix products, by their names in Linux."""
_PACKAGES = ("flyspec", "torch", "transformers", "numpy", "grpcio")


def this_machine() -> dict[str, Any]:
    import torch

    known: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().split("\n\n")[0].splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    flags = (known.get("flags") or known.get("Features") or "").split()
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "instruction_sets": [name for name in _RELEVANT if name in flags],
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "driver": _driver() if torch.cuda.is_available() else "",
        "versions": versions,
    }


def _driver() -> str:
    """The version of NVIDIA's driver, as its kernel module tells it; empty if unknown."""
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else ""
