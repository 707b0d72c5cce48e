"""Reads numbers from a device: the only place of judging that waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reading = Callable[[int], Sequence[float]]
"""Numbers of one row of a table."""


def read(tables: Sequence[Tensor]) -> list[float]:
    """Return the numbers of all tables, one after the other, in one transfer.

    Token ids and numbers of every floating type are exact in the float64 that is read.
    """
    numbers: list[float] = torch.cat([t.to(torch.float64).flatten() for t in tables]).tolist()
    return numbers


class Readings:
    """Tables on a device, [rows, numbers] each, that are read together."""

    def __init__(self) -> None:
        self._tables: list[Tensor] = []
        self._size = 0
        self._numbers: list[float] = []

    def add(self, table: Tensor) -> Reading:
        """Return the table's reading, for use after `read`."""
        begin, width = self._size, table.shape[1]
        self._tables.append(table)
        self._size += table.numel()
        return lambda row: self._numbers[begin + row * width : begin + (row + 1) * width]

    def read(self) -> None:
        if self._tables:
            self._numbers = read(self._tables)
