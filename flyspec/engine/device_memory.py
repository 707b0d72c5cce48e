"""What memory a device has: read before a model is loaded, and when its cache is to be sized.

Tests replace `device_memory` and `peak_bytes`; nothing else asks a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

OUTSIDE_TORCH = 1_000_000_000
"""What a process takes of a GPU beside torch's own memory: CUDA's context, kernels, NCCL's buffers.
Nobody says how much that is, so it is an estimate, on the high side."""

_MEMINFO = Path("/proc/meminfo")
# Limit, use, statistics and the line there of pages that the kernel gives up when it needs some.
_CGROUPS = tuple(
    (root / limit, root / used, root / "memory.stat", key)
    for root, limit, used, key in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    )
)  # fmt: skip


class DeviceMemory(NamedTuple):
    """Bytes of a device: all, those that anyone may still take, those this process holds."""

    total: int
    free: int
    own: int = 0

    def room(self, utilization: float = 1.0) -> int:
        """Bytes that this process may still take, if it may hold that share of the device."""
        return max(0, min(self.free, int(self.total * utilization) - self.own))


def device_memory(device: torch.device) -> DeviceMemory | None:
    """A device's memory now; None where it cannot be told."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(device) + OUTSIDE_TORCH)
    return host_memory() if device.type == "cpu" else None


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that `work` takes of a GPU at most, beyond what torch holds there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def give_back(device: torch.device) -> None:
    """Return what torch holds of a GPU and does not use, so that `device_memory` sees it free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def host_memory() -> DeviceMemory | None:
    """This machine's memory, or a container's limit if that is less; None where nobody says."""
    found = [memory for memory in (_machine(), *map(_container, _CGROUPS)) if memory]
    if not found:
        return None
    return DeviceMemory(min(m.total for m in found), min(m.free for m in found))


def _machine() -> DeviceMemory | None:
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        sizes = {name: int(value) * 1024 for name, value, *_ in lines}
        return DeviceMemory(sizes["MemTotal:"], sizes["MemAvailable:"])
    return None  # another system than Linux


def _container(files: tuple[Path, Path, Path, str]) -> DeviceMemory | None:
    limit_file, used_file, statistics, key = files
    with suppress(OSError, KeyError, ValueError):  # no such group, or its limit is "max"
        limit, used = int(limit_file.read_text()), int(used_file.read_text())
        kept = dict(line.split() for line in statistics.read_text().splitlines())
        return DeviceMemory(limit, max(0, limit - used + int(kept[key])))
    return None
