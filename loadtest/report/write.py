"""Writes what was asked for: page, data, plot."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyspec.drawing import save
from loadtest.report.document import to_json
from loadtest.report.figures import plots
from loadtest.report.page import page


def write(
    document: dict[str, Any],
    html: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Write each file that is named."""
    if json is not None:
        json.write_text(to_json(document))
    if plot is not None:
        main = plots(document)[0]
        save(plot, main.inches, main.draw)
    if html is not None:
        html.write_text(page(document))


def write_records(path: Path, lines: Iterable[str]) -> None:
    """Write every request, one a line; compressed if the name ends in .gz."""
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
