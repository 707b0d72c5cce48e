"""Counts of what work asks of a CUDA device: kernels, graphs, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "flyspec: counted"
_KERNELS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
_GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize",
          "cuCtxSynchronize")  # fmt: skip
_EVENT_WAITS = ("cudaEventSynchronize", "cuEventSynchronize")


class DeviceCalls(NamedTuple):
    """Calls of CUDA by the host during some work.

    `waits` are those that end once the device has done what was queued, as a read of a tensor does.
    `event_waits` are for one earlier event, which may be long over. `names` has every call by name.
    """

    kernels: int
    graphs: int
    waits: int
    event_waits: int
    names: dict[str, int]


def count_calls(work: Callable[[], object]) -> DeviceCalls:
    """Run `work` under torch's profiler, and count what it asked of CUDA.

    Without a CUDA device all are 0.
    """
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        with record_function(_RANGE):
            work()
        if on_cuda:
            torch.cuda.synchronize()  # outside of the range: not the work's own
    events = [e for e in profiler.events() or () if e.device_type == DeviceType.CPU]
    (span,) = (event.time_range for event in events if event.name == _RANGE)
    return counted(e.name for e in events if span.start <= e.time_range.start <= span.end)


def counted(calls: Iterable[str]) -> DeviceCalls:
    """Count the calls of CUDA among some."""
    names = Counter(
        name
        for name in calls
        if name.startswith("cuda") or (name.startswith("cu") and name[2:3].isupper())
    )
    kernels, graphs, waits, event_waits = (
        sum(count for name, count in names.items() if name.startswith(starts))
        for starts in (_KERNELS, _GRAPHS, _WAITS, _EVENT_WAITS)
    )
    return DeviceCalls(kernels, graphs, waits, event_waits, dict(names))
