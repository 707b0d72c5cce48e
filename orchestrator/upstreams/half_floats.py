"""Log-probabilities as little-endian half floats, looked at all at once and without numpy.

A row of a whole vocabulary is some hundred thousand of them: it is read as one large integer with
a lane of 16 bits for each.
"""

from __future__ import annotations

import struct
from functools import lru_cache

IMPOSSIBLE = struct.pack("<e", float("-inf"))
"""The logarithm of a probability of 0."""
_INFINITY = 0x7C00  # without its sign; above it is NaN
_ROUNDING = int.from_bytes(struct.pack("<e", 1e-3), "little")
"""A log-probability computed to be 0 may come out larger by so much."""


def are_log_probs(values: bytes) -> bool:
    """Whether each is a number of at most 0, rounding aside, or -inf."""
    lanes, size = int.from_bytes(values, "little"), len(values) // 2
    sign = _lanes(size, 0x8000)
    magnitude = lanes & _lanes(size, 0x7FFF)
    # What is added carries into a lane's sign bit from the first value on that is not allowed.
    not_numbers = magnitude + _lanes(size, 0x8000 - (_INFINITY + 1))
    above_zero = (magnitude + _lanes(size, 0x8000 - (_ROUNDING + 1))) & ~lanes
    return not (not_numbers | above_zero) & sign


def any_impossible(log_probs: bytes) -> bool:
    """Whether one of the log-probabilities is -inf."""
    lanes, size = int.from_bytes(log_probs, "little"), len(log_probs) // 2
    magnitude = lanes & _lanes(size, 0x7FFF)
    return bool((magnitude + _lanes(size, 0x8000 - _INFINITY)) & _lanes(size, 0x8000))


def all_impossible(log_probs: bytes) -> bool:
    """Whether all of them are."""
    return log_probs == IMPOSSIBLE * (len(log_probs) // len(IMPOSSIBLE))


@lru_cache(maxsize=16)
def _lanes(size: int, value: int) -> int:
    """So many lanes with that value."""
    return int.from_bytes(value.to_bytes(2, "little") * size, "little")
