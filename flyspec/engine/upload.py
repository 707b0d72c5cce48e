"""Moves small host tensors to a device without waiting for what the device is doing."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's values on a device; on a CPU the tensor itself.

    A copy from ordinary memory may wait until all earlier work on a GPU is done; one from pinned
    memory is only queued behind it.
    """
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
