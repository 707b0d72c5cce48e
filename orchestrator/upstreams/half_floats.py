"""Vectorised checks of log-probabilities in little-endian half floats, without numpy.

A row for an entire vocabulary has some hundred thousand values: it is read as one large integer
with a 16-bit lane per value.
"""

from __future__ import annotations

import struct
from functools import lru_cache

IMPOSSIBLE = struct.pack("<e", float("-inf"))
"""The logarithm of a probability of 0."""
_INFINITY = 0x7C00  # without sign; larger values are NaN
_ROUNDING = int.from_bytes(struct.pack("<e", 1e-3), "little")
"""Rounding tolerance: a log-probability of 0 may be computed as up to this value."""


def are_log_probs(values: bytes) -> bool:
    """Return whether all values are numbers of at most 0, up to rounding, or -inf."""
    lanes, size = int.from_bytes(values, "little"), len(values) // 2
    sign = _lanes(size, 0x8000)
    magnitude = lanes & _lanes(size, 0x7FFF)
    # The addition carries into a lane's sign bit if and only if its value is not allowed.
    not_numbers = magnitude + _lanes(size, 0x8000 - (_INFINITY + 1))
    above_zero = (magnitude + _lanes(size, 0x8000 - (_ROUNDING + 1))) & ~lanes
    return not (not_numbers | above_zero) & sign


def any_impossible(log_probs: bytes) -> bool:
    """Return whether any of the log-probabilities is -inf."""
    lanes, size = int.from_bytes(log_probs, "little"), len(log_probs) // 2
    magnitude = lanes & _lanes(size, 0x7FFF)
    return bool((magnitude + _lanes(size, 0x8000 - _INFINITY)) & _lanes(size, 0x8000))


def all_impossible(log_probs: bytes) -> bool:
    """Return whether all of the log-probabilities are -inf."""
    return log_probs == IMPOSSIBLE * (len(log_probs) // len(IMPOSSIBLE))


@lru_cache(maxsize=16)
def _lanes(size: int, value: int) -> int:
    """Return `size` lanes that each hold `value`."""
    return int.from_bytes(value.to_bytes(2, "little") * size, "little")
