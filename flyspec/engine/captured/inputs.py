"""The host's inputs of a fixed-shape step, in one vector, so that it takes one transfer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Inputs:
    """Named vectors of int64 or float64, views of one buffer on the host and one on the device.

    `host` is written, then `send` copies everything. The device's tensors never move, so a captured
    graph may read them.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        floats: Collection[str],
        device: torch.device,
        pinned: bool = True,
    ) -> None:
        total = sum(sizes.values())
        pinned = pinned and device.type == "cuda"  # which takes longer than it saves once
        buffer = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
        self._pinned = pinned
        self._buffer, self._sent = buffer, torch.zeros(total, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        self.host: dict[str, NDArray[Any]] = {}
        self._device: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            host, sent = buffer[at : at + size], self._sent[at : at + size]
            if name in floats:
                host, sent = host.view(torch.float64), sent.view(torch.float64)
            self.host[name], self._device[name] = host.numpy(), sent
            at += size

    def __getitem__(self, name: str) -> Tensor:
        """The device's tensor of this name."""
        return self._device[name]

    def clear(self) -> None:
        """Make everything padding: token 0 at position 0, written to the memory's first row."""
        if self._copied is not None:
            self._copied.synchronize()  # with the last transfer, long over as a rule
        self._buffer.zero_()

    def send(self) -> None:
        self._sent.copy_(self._buffer, non_blocking=True)
        if self._pinned:
            self._copied = torch.cuda.current_stream(self._sent.device).record_event(self._copied)
