"""Results of `flyspec bench device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BoundedCost:
    """Times in ms of some work, by mode, and the least that reading its bytes once takes.

    `step_ms`, `slowest_ms` and `answer_ms` are as in `timing.DeviceTimes`; `ratio` is `step_ms`
    over `bound_ms`.
    """

    mode: str
    batch: int
    tokens: int
    context: int
    step_ms: float
    slowest_ms: float
    answer_ms: float
    weight_bytes: int
    cache_bytes: int
    bound_ms: float
    ratio: float


@dataclass(frozen=True)
class StepTime(BoundedCost):
    """A step of `batch` sequences with `tokens` each, after `context` cached ones."""


@dataclass(frozen=True)
class DraftTime(BoundedCost):
    """A proposal of `tokens` per sequence, drawn one after the other and read once.

    `token_ms` is `answer_ms` per token; `waits` the times that the host waits for the device.
    """

    token_ms: float = 0.0
    waits: int | None = None


@dataclass(frozen=True)
class JudgingTime:
    """Judging `rounds` rounds of K drafts together; times in ms.

    `launches` and `waits` are those of the device, None without CUDA.
    """

    rule: str
    temperature: float
    num_speculative_tokens: int
    rounds: int
    answer_ms: float
    slowest_ms: float
    launches: int | None
    waits: int | None


@dataclass(frozen=True)
class DeviceReport:
    """Measurements on a device. `bandwidth` is in bytes per second, read and written."""

    device: str
    dtype: str
    target: str
    draft: str
    target_parameters: int
    attention: str
    block_size: int
    vocab_size: int
    repeats: int
    bandwidth: float
    copied_bytes: int
    machine: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why a mode was not measured, by mode."""
    steps: Sequence[StepTime] = ()
    drafts: Sequence[DraftTime] = ()
    judging: Sequence[JudgingTime] = ()
