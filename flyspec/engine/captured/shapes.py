"""The sizes of fixed-shape steps. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of a batch that captured steps are rounded up to."""
LENGTHS = (1, 4, 16, 33, 64, 128)
"""Tokens of a sequence in a padded step that rounds are rounded up to: K drafts take K + 1. Few,
since attention is compiled for each."""
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a ragged step that captured steps are rounded up to."""
MAX_TOKENS = 512
"""Maximum tokens of a captured step: beyond it arithmetic takes longer than launching kernels."""
CONTINUATIONS = (16, 8, 4, 2, 1)
"""Numbers of single-token steps that are captured together; any number up to their sum is a sum of
some, each once."""
AHEAD = (32, 16)
"""Sequences, and tokens of each, up to which steps are captured before the first request."""
MAX_SAMPLED = 128
"""Maximum tokens of a captured step that samples: noise and sorting take memory for all of them."""
LONG = 128
"""Tokens of a sequence from which a padded step runs it by itself, padded to a power of two."""


class StepShape(NamedTuple):
    """A step of up to `sequences` sequences, with `tokens` rows in all.

    Padded (`longest` > 0), each sequence has `longest` rows, and `tokens` is their product; ragged
    (0), the sequences' rows follow each other.
    """

    sequences: int
    longest: int
    tokens: int

    def first_rows(self, lengths: Sequence[int]) -> list[int]:
        """Return the first row of each sequence, given their numbers of tokens."""
        if not lengths:
            return []
        if self.longest:
            return [index * self.longest for index in range(len(lengths))]
        return [0, *accumulate(lengths[:-1])]


def padded(sequences: int, longest: int) -> StepShape:
    return StepShape(sequences, longest, sequences * longest)


def round_up(size: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that is no less than `size`, if any."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def captured_shape(lengths: Sequence[int], ragged: bool) -> StepShape | None:
    """Return the shape to capture for sequences of these lengths; None if they are too long."""
    sequences = round_up(len(lengths), SEQUENCES)
    if ragged:
        tokens = round_up(sum(lengths), TOKENS)
        if sequences is None or tokens is None:
            return None
        return StepShape(sequences, 0, max(tokens, sequences))
    longest = round_up(max(lengths), LENGTHS)
    if sequences is None or longest is None or sequences * longest > MAX_TOKENS:
        return None
    return padded(sequences, longest)


def exact_shapes(lengths: Sequence[int], ragged: bool) -> list[tuple[list[int], StepShape]]:
    """Return shapes for a step that runs once, each with the indices of its sequences.

    Padded, short sequences run together, and each long one by itself; sizes are rounded up, since
    attention is compiled for each.
    """
    every = range(len(lengths))
    if ragged:
        return [([*every], StepShape(len(lengths), 0, sum(lengths)))]
    short = [index for index in every if lengths[index] < LONG]
    groups = [
        ([index], padded(1, 1 << (lengths[index] - 1).bit_length()))
        for index in every
        if lengths[index] >= LONG
    ]
    if short:
        longest = max(lengths[index] for index in short)
        sequences = round_up(len(short), SEQUENCES) or len(short)
        groups.append((short, padded(sequences, round_up(longest, LENGTHS) or longest)))
    return groups


def continuations(count: int) -> list[int]:
    """Return the captured numbers of single-token steps that add up to `count`, each at most once.

    `count` must be at most `sum(CONTINUATIONS)`.
    """
    parts = []
    for size in CONTINUATIONS:
        if count >= size:
            parts.append(size)
            count -= size
    assert not count
    return parts
