"""The files of a load test: results with a page, the document read again, and every request."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flyspec.cli.program import check_file
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec_lab.results import MeasurementReport, PlottedResults
from loadtest.report.base import VERSION, LabReport
from loadtest.report.page import page


# fmt: off
@dataclass(frozen=True)
class LabResults(PlottedResults):
    """Where results go, a page included."""

    html: Annotated[Path | None, Flag(
        "Write the report with its plots as one HTML file.", group="Results",
    )] = None
    # fmt: on

    def check(self) -> None:
        super().check()
        check_file("--html", self.html, (".html",))

    def write(self, report: MeasurementReport) -> None:
        super().write(report)
        if self.html is not None:
            assert isinstance(report, LabReport)
            self.html.write_text(page(report))


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
