"""`python -m bench.gpu`: the tables and plots of measurements/gpu.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.documents import write_between
from bench.gpu.example import example_parts
from bench.gpu.parts import NOTHING, measured_parts, read_reports
from bench.gpu.plots import plot_steps
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag


@with_flags
def gpu(
    reports: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of JSON reports of `make gpu-bench`.")
    ] = Path("build/gpu"),
    document: Annotated[Path, Flag("Document to update.")] = Path("docs/measurements/gpu.md"),
) -> None:
    """Write measurements on a GPU, and what follows from the memory planner, into a document.

    Rewrites what is between <!-- NAME --> and <!-- /NAME -->. Reports of other devices do not
    count, and parts without reports say that nothing was measured.
    """
    if not document.is_file():
        raise ConfigError(f"--document {document}: no such file")
    found = read_reports(reports)
    images = document.parent / "images"
    images.mkdir(exist_ok=True)
    plot = images / f"{document.stem}-steps.svg"
    drawn = plot_steps(found.get("device", ()), plot)
    shown = f"![steps by batch, against reading memory once](images/{plot.name})"
    parts = {**example_parts(), **measured_parts(found), "plot": shown if drawn else NOTHING}
    document.write_text(write_between(document.read_text(), parts))
    print(f"wrote {document}" + (f" and {plot}" if drawn else ""))


if __name__ == "__main__":
    run(single(gpu))
