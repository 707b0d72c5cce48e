"""`python -m bench.performance`: the tables and plots of measurements/performance.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.documents import write_between
from bench.performance.parts import parts_of
from bench.performance.plots import plot_batches, plot_groups
from bench.performance.reports import groups, others_of, read_reports
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag

DOCUMENT = Path("docs/measurements/performance.md")


@with_flags
def performance(
    reports: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of JSON reports of `flyspec bench`.")
    ] = Path("build/performance"),
    document: Annotated[Path, Flag("Document to update.")] = DOCUMENT,
) -> None:
    """Write measurements into a document: its tables and its plots.

    Rewrites what is between <!-- NAME --> and <!-- /NAME -->. Parts without reports are left as
    they are.
    """
    found = read_reports(reports)
    if not document.is_file():
        raise ConfigError(f"--document {document}: no such file")
    text = write_between(document.read_text(), parts_of(found))
    speed = found.get("speed", ())
    images = document.parent / "images" / document.stem
    images.parent.mkdir(exist_ok=True)
    plot_groups(groups(speed), others_of(speed), images)
    plot_batches([b for d in speed for b in d["batches"]], images)
    document.write_text(text)
    print(f"wrote {document} and {images}-*.svg")


if __name__ == "__main__":
    run(single(performance))
