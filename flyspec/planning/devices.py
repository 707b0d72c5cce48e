"""Data of common devices, from their makers' data sheets."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from flyspec.errors import ConfigError


class Device(NamedTuple):
    """A device: bytes of its memory (0: unknown), bytes/s read from it, dense bfloat16 FLOP/s."""

    memory_bytes: float
    bandwidth: float
    flops: float


DEVICES = {
    "a100": Device(80e9, 2.039e12, 312e12),
    "h100": Device(80e9, 3.35e12, 989e12),
    "h200": Device(141e9, 4.8e12, 989e12),
    "l4": Device(24e9, 300e9, 121e12),
    "l40s": Device(48e9, 864e9, 362e12),
    "4090": Device(24e9, 1.008e12, 165e12),
    "cpu": Device(0, 0, math.inf),
}
"""NVIDIA's data sheets (SXM form of A100 80 GB, H100 and H200) and, for the 4090, its Ada
whitepaper; without sparsity. A CPU's bandwidth is the user's to give."""
READING = Device(0, 1.0, math.inf)
"""Any device that only reads memory: ratios of such times do not depend on its bandwidth."""


class DeviceGroup(NamedTuple):
    """Equal devices that hold a model together."""

    name: str
    device: Device
    size: int = 1


def read_group(text: str, bandwidth_gb_s: float = 0, tflops: float = 0) -> DeviceGroup:
    """Parse NAME or NAMExN; `bandwidth_gb_s` and `tflops` of a device replace the table's.

    Raises `ConfigError`.
    """
    found = re.fullmatch(rf"({'|'.join(DEVICES)})(?:x([1-9]\d*))?", text.lower())
    if found is None:
        names = ", ".join(DEVICES)
        raise ConfigError(f"--device {text}: must be one of {names}, or several of it: h100x4")
    device = DEVICES[found[1]]
    device = device._replace(
        bandwidth=bandwidth_gb_s * 1e9 or device.bandwidth, flops=tflops * 1e12 or device.flops
    )
    if not device.bandwidth:
        raise ConfigError(f"--device {text}: has no known bandwidth; give --bandwidth GB/s")
    return DeviceGroup(found[1], device, int(found[2] or 1))
