"""What a report has, whatever was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """A finished measurement: `document` is what `--json` writes.

    Every document has `version`, `passed`, `checks` (of `name`, `passed`, `said`), `warnings` and
    `options`.
    """

    words: ClassVar[Sequence[tuple[str, str]]] = ()
    """Terms and their meaning, for the page."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    @property
    def passed(self) -> bool:
        """Whether everything that had to hold did."""
        return bool(self.document["passed"])

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
