"""`flyspec heads`: trains draft heads."""

from __future__ import annotations

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import needing
from flyspec_lab.report import Results
from flyspec_lab.training.options import HeadTrainOptions

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Draft heads of a target."""


@app.command("train")
@with_flags
def train(options: HeadTrainOptions, results: Results) -> None:
    """Train an EAGLE-3 head on texts that the target writes.

    It is saved every three minutes, and after Ctrl-C as it is then.
    """
    with needing("training", "models"):
        from flyspec_lab.training import head
    results.of(lambda: head.train(options))
