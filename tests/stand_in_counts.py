"""What happens on the stand-in device (`tests.stand_in`): counted, or refused during a capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

Kind = Literal["read", "write", "hidden", "synchronize"]
Execute = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Runs an operator on CPU tensors: (operator, arguments, keyword arguments) -> its result."""

_ROOT = Path(__file__).resolve().parents[1]
_REASONS: dict[Kind, str] = {
    "read": "copies device memory to the host",
    "write": "copies host memory to the device",
    "hidden": "waits for the device, because the shape of its result depends on data",
    "synchronize": "waits for the device",
}


class Stray(NamedTuple):
    """A transfer or a wait, and what caused it, as FILE:LINE."""

    kind: Kind
    operator: str
    place: str
    """The innermost line of this checkout, from its root."""
    inside: str
    """The innermost line of any package but torch, from the package's name; `place` if that is."""


@dataclass
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
    where: list[Stray] = field(default_factory=list)
    """All but the operations, in order."""

    @property
    def synchronizations(self) -> int:
        """How often the host waited for the device."""
        return self.reads + self.hidden + self.synchronized


_counting: list[Counts] = []
_capturing: list[Execute | None] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what all threads do on the device. May be nested: each counts for itself."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [other for other in _counting if other is not counts]


@contextmanager
def capturing(execute: Execute | None = None) -> Iterator[None]:
    """Refuse what a CUDA graph cannot capture: transfers, and waiting for the device.

    With `execute`, that runs operators, views and allocations included, and none counts as
    launched. `RuntimeError` names a refused operator and its place.
    """
    if _capturing:
        raise RuntimeError("the stand-in device captures already; end that capture first")
    _capturing.append(execute)
    try:
        yield
    finally:
        _capturing.clear()


def is_capturing() -> bool:
    return bool(_capturing)


def capturing_with() -> Execute | None:
    """Return what runs operators in the current capture."""
    return _capturing[0] if _capturing else None


def count_operation() -> None:
    """Count a launch."""
    for counts in _counting:
        counts.operations += 1


def note(kind: Kind, operator: str) -> None:
    """Count a transfer or a wait. Raises `RuntimeError` where it is refused."""
    stray = Stray(kind, operator, *_places())
    if _capturing:
        raise RuntimeError(
            f"{operator} at {stray.place} (in {stray.inside}) {_REASONS[kind]}: a captured step "
            "must not; move it out of the step, or use an operation that stays on the device"
        )
    for counts in _counting:
        counts.where.append(stray)
        counts.reads += kind == "read"
        counts.writes += kind == "write"
        counts.hidden += kind == "hidden"
        counts.synchronized += kind == "synchronize"


def _places() -> tuple[str, str]:
    """The `place` and `inside` of what calls `note`."""
    inside = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "site-packages" in path.parts:
            parts = path.parts[path.parts.index("site-packages") + 1 :]
            if not inside and parts[0] != "torch":
                inside = f"{'/'.join(parts)}:{frame.f_lineno}"
        elif path.is_relative_to(_ROOT) and not path.name.startswith("stand_in"):
            place = f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
            return place, inside or place
        frame = frame.f_back
    return "nowhere in this checkout", inside or "nowhere"
