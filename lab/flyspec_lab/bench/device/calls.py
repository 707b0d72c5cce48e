"""Counts of what work asks of a CUDA device: kernels, graphs, copies, and waits of the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)

_RANGE = "flyspec: counted"
_KERNELS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")
_GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
_COPIES = ("cudaMemcpy", "cuMemcpy")
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
    copies: int
    waits: int
    event_waits: int
    names: dict[str, int]

    @property
    def launches(self) -> int:
        """Things that the device is told to run: a graph counts once."""
        return self.kernels + self.graphs


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
    spans = [event.time_range for event in events if event.name == _RANGE]
    return counted_within((spans[0].start, spans[0].end), [
        (event.name, event.time_range.start) for event in events
    ])  # fmt: skip


def calls_on(device: torch.device, work: Callable[[], object]) -> DeviceCalls | None:
    """Return what `work` asks of a CUDA device; None elsewhere, or if it cannot be observed.

    An error of `work` itself is raised.
    """
    if device.type != "cuda":
        return None
    work()
    try:
        return count_calls(work)
    except RuntimeError as error:
        log.warning("calls of CUDA cannot be counted here: %s", error)
        return None


def counted_within(span: tuple[float, float], calls: list[tuple[str, float]]) -> DeviceCalls:
    """Count the calls (name, begin) that begin within the span."""
    begin, end = span
    names = Counter(name for name, at in calls if begin <= at <= end and _of_cuda(name))

    def total(starts: tuple[str, ...]) -> int:
        return sum(count for name, count in names.items() if name.startswith(starts))

    return DeviceCalls(
        total(_KERNELS), total(_GRAPHS), total(_COPIES), total(_WAITS), total(_EVENT_WAITS),
        dict(names),
    )  # fmt: skip


def _of_cuda(name: str) -> bool:
    return name.startswith("cuda") or (name.startswith("cu") and name[2:3].isupper())
