"""Parts of a step's time: attention with its masks, writes to the cache, matrix products.

The functions that do them are timed one by one while a context is open. On a GPU each waits for the
device, so that the parts are times on the device; their sum then exceeds an undisturbed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from flyspec.engine.attention.base import StepAttention
from flyspec.engine.batch_invariance import tiles
from flyspec.engine.kv_memory import KVLayer

PARTS = ("attention", "cache_write", "matrix_products")
"""The rest is norms, rotations, activations, packing, calls. All linear layers are products."""


@contextmanager
def timed_parts(synchronize: Callable[[], None]) -> Iterator[dict[str, float]]:
    """Yield the seconds of each part of what runs in this context."""
    times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    timed: list[tuple[Any, str, str]] = [
        *((kind, "attend", "attention") for kind in StepAttention.__subclasses__()),
        (KVLayer, "write", "cache_write"),
        (torch.nn.functional, "linear", "matrix_products"),
        (tiles, "linear", "matrix_products"),  # of the batch-invariant mode
    ]
    with ExitStack() as patches:
        for owner, method, part in timed:
            function = _timed(getattr(owner, method), times, part, synchronize)
            patches.enter_context(patch.object(owner, method, function))
        yield times


def _timed(
    function: Callable[..., Any],
    times: dict[str, float],
    part: str,
    synchronize: Callable[[], None],
) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize()
        times[part] += time.perf_counter() - begin
        return result

    return call
