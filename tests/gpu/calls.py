"""Counts of what work asks of a CUDA device: kernels, graphs, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

KERNELS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize",
         "cuCtxSynchronize")  # fmt: skip
"""Calls that end once the device has done what was queued, as a read of a tensor does."""
EVENT_WAITS = ("cudaEventSynchronize", "cuEventSynchronize")
"""Waits for one earlier event, which may be long over."""


class Calls(Counter[str]):
    """Calls of the host by name; those of CUDA begin with one of the names above."""

    def of(self, starts: tuple[str, ...]) -> int:
        return sum(count for name, count in self.items() if name.startswith(starts))


def count_calls(work: Callable[[], object]) -> Calls:
    """Run `work` under torch's profiler, and count its calls."""
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        with record_function("counted"):
            work()
        if on_cuda:
            torch.cuda.synchronize()  # outside of the range: not the work's own
    events = [e for e in profiler.events() or () if e.device_type == DeviceType.CPU]
    (span,) = (event.time_range for event in events if event.name == "counted")
    return Calls(e.name for e in events if span.start <= e.time_range.start <= span.end)
