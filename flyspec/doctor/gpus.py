"""The GPUs that this process would see, and their memory, from the driver's own tool."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache

from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory

_QUERY = "index,uuid,name,memory.total,memory.free"
_TIMEOUT_S = 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU by the index under which torch knows it."""

    index: int
    name: str
    memory: DeviceMemory


@cache
def gpus() -> list[Gpu]:
    """Return the visible GPUs; empty if there are none, or without nvidia-smi."""
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(said, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(listing: str, chosen: str | None) -> list[Gpu]:
    """Return the GPUs of nvidia-smi's listing that CUDA_VISIBLE_DEVICES (None: unset) chooses."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line]
    whole = [row for row in rows if len(row) == 5 and row[3].isdigit() and row[4].isdigit()]
    if chosen is not None:
        by_name = {row[0]: row for row in whole}
        found = []
        for name in (part.strip() for part in chosen.split(",")):
            row = by_name.get(name) or next((r for r in whole if r[1].startswith(name)), None)
            if not name or row is None:
                break  # as CUDA does: the rest is hidden
            found.append(row)
        whole = found
    return [
        # Of our own process, CUDA's context will be there.
        Gpu(index, name, DeviceMemory(int(total) * _MIB, int(free) * _MIB, OUTSIDE_TORCH))
        for index, (_, _, name, total, free) in enumerate(whole)
    ]
