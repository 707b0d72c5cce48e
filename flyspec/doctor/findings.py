"""Findings of an examination, as text and as a document."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

_MARK_WIDTH = 9


class Mark(StrEnum):
    """Severity of a finding: only an error keeps the installation from starting."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report: what was found of a subject; if not ok, also what to change.

    `facts` has its numbers for programs.
    """

    section: str
    subject: str
    mark: Mark
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def as_text(findings: Sequence[Diagnosis], width: int = 80) -> str:
    """Return the report: a block per section, marks in words, at most `width` columns."""
    lines: list[str] = []
    for section, group in groupby(findings, lambda finding: finding.section):
        lines += ["", section] if lines else [section]
        here = list(group)
        subjects = max(len(found.subject) for found in here) + 2
        for found in here:
            head = f"  {found.mark:<{_MARK_WIDTH}}{found.subject:<{subjects}}"
            indent = " " * len(head)
            lines += textwrap.wrap(
                found.text, width, initial_indent=head, subsequent_indent=indent,
                break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Iterable[Diagnosis]) -> str:
    marks = [finding.mark for finding in findings]
    counts = [
        f"{count} {mark}{'s' * (count > 1)}"
        for mark in (Mark.ERROR, Mark.WARNING)
        if (count := marks.count(mark))
    ]
    return " and ".join(counts) or "no problem found"


def as_document(findings: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "ok": all(finding.mark is not Mark.ERROR for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
