"""Times work that is queued on a device and only waited for together with what follows it."""

from __future__ import annotations

from time import perf_counter_ns

import torch


class Stopwatch:
    """Starts when it is made. On a GPU it reads events, elsewhere the clock."""

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._began_ns = self._marked_ns = perf_counter_ns()
        self._events = [self._event()] if self._device.type == "cuda" else []

    def mark(self) -> None:
        """Mark the end of what has been queued so far."""
        self._marked_ns = perf_counter_ns()
        if self._events:
            self._events.append(self._event())

    @property
    def marked_ns(self) -> int:
        """Time at which the work before the mark was done, on the scale of `perf_counter_ns`.

        On a GPU it waits for that, so read it after whatever else waits.
        """
        if not self._events:
            return self._marked_ns
        begin, end = self._events
        end.synchronize()
        return self._began_ns + round(float(begin.elapsed_time(end)) * 1e6)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
