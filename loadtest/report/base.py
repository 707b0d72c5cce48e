"""What a report has, whatever was measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flyspec import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

DIGITS = 5
VERSION = 2


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot, its size in inches, and its caption."""

    title: str
    inches: tuple[float, float]
    caption: str
    draw: Callable[[Figure], None]


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first `left` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


class LabReport(ABC):
    """A finished measurement: a `MeasurementReport` made from its document alone.

    Every document has `version`, `passed`, `checks` (of `name`, `passed`, `said`), `warnings` and
    `options`. Its numbers are shortened to `DIGITS` significant digits, since measurements have no
    more.
    """

    samples: Mapping[str, Any] = {}
    words: ClassVar[Sequence[tuple[str, str]]] = ()
    """Terms and their meaning, for the page."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document: dict[str, Any] = short(document)

    @property
    def passed(self) -> bool:
        """Whether everything that had to hold did."""
        return bool(self.document["passed"])

    @property
    def shown(self) -> Sequence[RenderableType]:
        """Tables, findings, checks and the verdict."""
        document = self.document
        checks = [
            f"{'ok    ' if check['passed'] else 'BROKEN'} {check['name']}: {check['said']}"
            for check in document["checks"]
        ]
        return [
            *(tables.make_table(t.columns, t.rows, left=t.left) for t in self.tables()),
            *self.lines(),
            *(f"warning: {warning}" for warning in document["warnings"]),
            *checks,
            "PASSED" if self.passed else "FAILED",
        ]

    def markdown(self) -> str:
        """Tables and findings for a document."""
        parts = [tables.markdown(t.columns, t.rows, left=t.left) for t in self.tables()]
        return "\n\n".join([*parts, "\n".join(f"- {line}" for line in self.lines())])

    def plot(self, path: Path) -> None:
        """Draw the main plot."""
        from flyspec_lab.drawing import save

        main = self.plots()[0]
        save(path, main.inches, main.draw)

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured."""

    @property
    def about(self) -> Sequence[str]:
        """Lines below the title, on the page."""
        return ()

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The results, the most important ones first."""

    @abstractmethod
    def lines(self) -> Sequence[str]:
        """The findings, in sentences."""

    @abstractmethod
    def plots(self) -> Sequence[Plot]:
        """The plots, the main one first."""


def short(value: Any) -> Any:
    """Shorten numbers; NaN and infinity become None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value == 0 or abs(value) >= 10**DIGITS:
            return round(value)
        return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [short(v) for v in value]
    return value
