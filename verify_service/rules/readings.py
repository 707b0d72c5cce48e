"""Reads numbers from a device: lazily where that is free, all at once where each read waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Column = Callable[[int, int], Tensor | NDArray[np.float64]]
"""Numbers of the rows from a start to a stop (exclusive): [rows, numbers]."""
Reading = Callable[[int], Sequence[float]]
"""Numbers of one row."""


def read(
    whole: Sequence[Tensor], columns: Sequence[Column], rows: int, device: torch.device
) -> tuple[list[list[float]], list[Reading]]:
    """Return the tensors `whole` [n] as lists, and each column as a function of the row.

    On a CPU, rows are computed on demand. Elsewhere all `rows` rows of all columns are computed and
    read in one transfer, since reading a row later would wait again. Token ids and numbers of every
    floating type are exact in the float64 that is read.
    """
    if device.type == "cpu":
        return [tensor.tolist() for tensor in whole], [_lazily(column) for column in columns]
    tables = [torch.as_tensor(column(0, rows)) for column in columns] if rows else []
    parts = [part.to(torch.float64).flatten() for part in (*whole, *tables)]
    numbers = torch.cat(parts).tolist()
    split, begin = [], 0
    for part in parts:
        split.append(numbers[begin : begin + part.shape[0]])
        begin += part.shape[0]
    readings = [
        _by_row(values, table.shape[1])
        for values, table in zip(split[len(whole) :], tables, strict=True)
    ]
    return split[: len(whole)], readings or [_nothing for _ in columns]


def _lazily(column: Column) -> Reading:
    found: dict[int, list[float]] = {}

    def reading(row: int) -> Sequence[float]:
        if row not in found:
            found[row] = column(row, row + 1)[0].tolist()
        return found[row]

    return reading


def _by_row(values: list[float], width: int) -> Reading:
    return lambda row: values[row * width : (row + 1) * width]


def _nothing(row: int) -> Sequence[float]:
    raise IndexError(row)
