"""What happens on the stand-in device (`tests.stand_in`): counted, or refused during a capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["reads", "writes", "hidden", "synchronized"]
Execute = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Runs an operator on CPU tensors: (operator, arguments, keyword arguments) -> its result."""

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(eq=False)
class Counts:
    """What happened on the device within `counting`."""

    reads: int = 0
    """Transfers from the device to the host, each of one tensor."""
    writes: int = 0
    """Transfers from the host to the device, each of one tensor."""
    hidden: int = 0
    """Operations that wait for the device because the shape of their result depends on data."""
    synchronized: int = 0
    """Calls of `torch.standin.synchronize`."""
    operations: int = 0
    """What a GPU would launch: neither views nor allocations nor transfers; a replayed graph is
    one, and what is captured for it is none."""
    where: list[str] = field(default_factory=list)
    """Operators and lines of this checkout that caused all but the operations, in order."""

    @property
    def synchronizations(self) -> int:
        """How often the host waited for the device."""
        return self.reads + self.hidden + self.synchronized


_counting: list[Counts] = []
_capturing: list[Execute] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what all threads do on the device."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


@contextmanager
def capturing(execute: Execute) -> Iterator[None]:
    """Have operators, views and allocations included, run by `execute`; none counts as launched.

    Refuses what a CUDA graph cannot capture, transfers and waiting for the device, with a
    `RuntimeError` that names the operator and its place.
    """
    _capturing.append(execute)
    try:
        yield
    finally:
        _capturing.clear()


def capturing_with() -> Execute | None:
    """Return what runs operators in the current capture."""
    return _capturing[0] if _capturing else None


def count_operation() -> None:
    """Count a launch."""
    for counts in _counting:
        counts.operations += 1


def note(kind: Kind, operator: str) -> None:
    """Count a transfer or a wait. Raises `RuntimeError` within a capture."""
    where = f"{operator} at {_place()}"
    if _capturing:
        raise RuntimeError(f"{where} transfers or waits; move it out of the captured step")
    for counts in _counting:
        counts.where.append(where)
        setattr(counts, kind, getattr(counts, kind) + 1)


def _place() -> str:
    """Return the innermost line of this checkout that calls `note`."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        packages = "site-packages" in path.parts or path.name.startswith("stand_in")
        if path.is_relative_to(_ROOT) and not packages:
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere in this checkout"
