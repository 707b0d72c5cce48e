"""Reads a device's memory, before a model is loaded and when its cache is sized.

Tests replace `device_memory` and `peak_bytes`; nothing else queries a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flyspec.engine.devices import AnyDevice

if TYPE_CHECKING:
    import torch

OUTSIDE_TORCH = 1_000_000_000
"""Bytes that a process uses on a GPU besides torch's own memory: CUDA's context, kernels, NCCL's
buffers. There is no way to query it, so this is an estimate, on the high side."""

_MEMINFO = Path("/proc/meminfo")
# Limit, usage and statistics, and the statistics' key for pages that the kernel can reclaim.
_CGROUPS = tuple(
    (root / limit, root / used, root / "memory.stat", key)
    for root, limit, used, key in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    )
)  # fmt: skip


class DeviceMemory(NamedTuple):
    """Bytes of a device: in total, free for any process, held by this process."""

    total: int
    free: int
    own: int = 0

    def room(self, utilization: float = 1.0) -> int:
        """Return the bytes that this process may still take, given its share of the device."""
        return max(0, min(self.free, int(self.total * utilization) - self.own))


def device_memory(device: AnyDevice) -> DeviceMemory | None:
    """Return a device's current memory; None if unknown."""
    if device.type == "cuda":
        import torch  # only for a GPU: what is planned for a CPU needs none

        gpu = torch.device(str(device))
        free, total = torch.cuda.mem_get_info(gpu)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(gpu) + OUTSIDE_TORCH)
    return host_memory() if device.type == "cpu" else None


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak GPU memory of `work`, in bytes, beyond what torch held before."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def give_back(device: AnyDevice) -> None:
    """Release the GPU memory that torch holds but does not use, so that it counts as free."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def host_memory() -> DeviceMemory | None:
    """Return this machine's memory, or a container's limit if that is less; None if unknown."""
    found = [memory for memory in (_machine(), *map(_container, _CGROUPS)) if memory]
    if not found:
        return None
    return DeviceMemory(min(m.total for m in found), min(m.free for m in found))


def _machine() -> DeviceMemory | None:
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        sizes = {name: int(value) * 1024 for name, value, *_ in lines}
        return DeviceMemory(sizes["MemTotal:"], sizes["MemAvailable:"])
    return None  # not Linux


def _container(files: tuple[Path, Path, Path, str]) -> DeviceMemory | None:
    limit_file, used_file, statistics, key = files
    with suppress(OSError, KeyError, ValueError):  # no such group, or its limit is "max"
        limit, used = int(limit_file.read_text()), int(used_file.read_text())
        kept = dict(line.split() for line in statistics.read_text().splitlines())
        return DeviceMemory(limit, max(0, limit - used + int(kept[key])))
    return None
