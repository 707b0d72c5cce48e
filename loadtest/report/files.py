"""Where reports go: the flags, the files, and the end of every measurement."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec.drawing import FORMATS, check_file, check_matplotlib, save
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from loadtest.report.base import LabReport
from loadtest.report.page import page
from loadtest.report.terminal import show

DIGITS = 5
VERSION = 2
STANDARD_OUTPUT = Path("-")
_report = partial(Flag, group="Report")


# fmt: off
@dataclass(frozen=True)
class ReportFiles:
    """The files of a report."""

    html: Annotated[Path | None, _report(
        "Write the report with its plots as one HTML file (needs matplotlib).",
    )] = None
    json: Annotated[Path | None, _report(
        "Write the report as JSON; - prints it instead of the tables.",
    )] = None
    plot: Annotated[Path | None, _report(
        "Write the main plot to a .svg, .png or .pdf file (needs matplotlib).",
    )] = None
    # fmt: on

    def validate(self, **others: tuple[Path | None, tuple[str, ...]]) -> None:
        """Raise `ConfigError` for files that cannot be written, before anything is measured."""
        files = {"html": (self.html, (".html",)), "json": (self.json, (".json",)),
                 "plot": (self.plot, FORMATS), **others}  # fmt: skip
        for name, (path, suffixes) in files.items():
            if path != STANDARD_OUTPUT:
                check_file(f"--{name}", path, suffixes)
        if self.html:
            check_matplotlib("--html")

    def write(self, report: LabReport) -> None:
        if self.json is not None and self.json != STANDARD_OUTPUT:
            self.json.write_text(to_json(report.document))
        if self.plot is not None:
            main = report.plots()[0]
            save(self.plot, main.inches, main.draw)
        if self.html is not None:
            self.html.write_text(page(report))

    def finish(self, report: LabReport) -> int:
        """Write the files and print the report; the exit code: 0 if it passed, else 1."""
        self.write(report)
        if self.json == STANDARD_OUTPUT:
            print(to_json(report.document), end="")
        else:
            show(report)
            if self.html is not None:
                print(f"report: {self.html}")
        return 0 if report.passed else 1


def to_json(document: dict[str, Any]) -> str:
    """One line per key; `DIGITS` significant digits, since measurements have no more."""
    lines = (f"{json.dumps(k)}: {json.dumps(short(v))}" for k, v in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> dict[str, Any]:
    """Read a document from its file. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ConfigError(f"{path}: is not a report of a load test of this version")
    return document


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write every request, one per line; compressed if the name ends in .gz."""
    data = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


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
