"""What a figure depends on beside the code: the processor, its instruction sets, versions."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_TOLD = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16",
         "asimd", "bf16", "sve", "i8mm")  # fmt: skip
"""Instruction sets that matrix products are made of, as Linux names them."""
_PACKAGES = ("flyspec", "torch", "transformers", "numpy", "grpcio")


@dataclass(frozen=True)
class Machine:
    """A machine as a report names it."""

    processor: str
    instruction_sets: tuple[str, ...]
    cores: int
    accelerator: str
    versions: dict[str, str]


def this_machine() -> dict[str, Any]:
    """The facts of this one, as JSON has them."""
    known: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().split("\n\n")[0].splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    flags = (known.get("flags") or known.get("Features") or "").split()
    return asdict(
        Machine(
            processor=known.get("model name") or platform.processor() or platform.machine(),
            instruction_sets=tuple(name for name in _TOLD if name in flags),
            cores=os.cpu_count() or 1,
            accelerator=_accelerator(),
            versions={"python": platform.python_version(), **dict(filter(all, _versions()))},
        )
    )


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
