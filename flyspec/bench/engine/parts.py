"""Parts of a step's time: attention with its masks, writes to the cache, matrix products.

The functions that do them are timed one by one while a context is open. On a GPU each waits for the
device, so that the parts are times on the device; their sum then exceeds an undisturbed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from flyspec.engine.attention.base import StepAttention
from flyspec.engine.batch_invariance import tiles
from flyspec.engine.slot_cache import SlotLayer


@dataclass(slots=True)
class PartTimes:
    """Seconds. `matrix_products` are those of all linear layers, including the output layer."""

    attention: float = 0.0
    cache_write: float = 0.0
    matrix_products: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """The rest: norms, rotations, activations, packing, calls."""
        return max(0.0, self.total - self.attention - self.cache_write - self.matrix_products)


@contextmanager
def timed_parts(synchronize: Callable[[], None]) -> Iterator[PartTimes]:
    """Yield the times of what runs in this context; the caller sets `total`."""
    times = PartTimes()
    timed: list[tuple[Any, str, str]] = [
        *((kind, "attend", "attention") for kind in StepAttention.__subclasses__()),
        (SlotLayer, "write", "cache_write"),
        (torch.nn.functional, "linear", "matrix_products"),
        (tiles, "linear", "matrix_products"),  # of the batch-invariant mode
    ]
    with ExitStack() as patches:
        for owner, method, part in timed:
            function = _timed(getattr(owner, method), times, part, synchronize)
            patches.enter_context(patch.object(owner, method, function))
        yield times


def _timed(
    function: Callable[..., Any], times: PartTimes, part: str, synchronize: Callable[[], None]
) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize()
        setattr(times, part, getattr(times, part) + time.perf_counter() - begin)
        return result

    return call
