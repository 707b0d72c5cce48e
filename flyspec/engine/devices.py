"""Devices and data types by name: what `--device` and `--dtype` mean, decided without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flyspec.engine.native.library import processor_flags
from flyspec.errors import ConfigError

AUTO = "auto"
NARROW_HIDDEN_SIZE = 256
_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
_FAST_BFLOAT16 = {"avx512_bf16", "amx_tile"}
"""Flags of processors that multiply bfloat16."""


class ElementType(Protocol):
    """The data type of a tensor's elements: torch's or `NamedType`."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""


class NamedType(NamedTuple):
    """A data type known by torch's name for it."""

    name: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int("".join(filter(str.isdigit, self.name))) // 8

    def __str__(self) -> str:
        return self.name


class AnyDevice(Protocol):
    """A device, torch's or `NamedDevice`: `type` is cpu or cuda."""

    @property
    def type(self) -> str:
        """The kind of device."""


@dataclass(frozen=True)
class NamedDevice:
    """A device as `--device` names it; `index` is None for the first."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def read_device(device: str) -> NamedDevice | None:
    """Return the device that `--device` names; None for `auto`. Raises `ConfigError`."""
    if device == AUTO:
        return None
    kind, _, index = device.partition(":")
    if not _DEVICE.fullmatch(device) or (kind == "cpu" and index not in ("", "0")):
        raise ConfigError(f"--device {device}: unknown device; use cpu, cuda, cuda:N or auto")
    return NamedDevice(kind, int(index) if index else None)


def no_cuda(device: str, reason: str) -> ConfigError:
    """Return the error for a GPU that this process cannot use."""
    return ConfigError(f"--device {device}: {reason}; use --device cpu")


def stored_type(config: Any) -> str:
    """Return the name of the type of a checkpoint's weights, by its configuration."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def choose_dtype(dtype: str, device_type: str, config: Any, native: bool) -> str:
    """Return the name of the data type for `--dtype`; `auto` is the checkpoint's where it is fast.

    `native`: the native step serves a model of this configuration in bfloat16. Without it, on a
    CPU, 16-bit weights pay off only if the processor multiplies them and the layers are wide enough
    for memory traffic to dominate; narrow models, typically drafts, run faster in float32
    (measured: a 1 M parameter draft takes 0.45 ms per step in float32, 0.72 ms in bfloat16).
    """
    if dtype != AUTO:
        return dtype
    stored = stored_type(config)
    if device_type == "cpu" and not (native and stored == "bfloat16"):
        fast = not _FAST_BFLOAT16.isdisjoint(processor_flags())
        narrow = getattr(config.get_text_config(), "hidden_size", 0) < NARROW_HIDDEN_SIZE
        if stored != "bfloat16" or not fast or narrow:
            return "float32"
    return stored
