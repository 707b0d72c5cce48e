"""`flyspec autojudge`: trains the judge of the rule `autojudge`."""

from __future__ import annotations

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import needing
from flyspec_lab.report import Results
from flyspec_lab.training.options import JudgeTrainOptions

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Judges of mismatches."""


@app.command("train")
@with_flags
def train(options: JudgeTrainOptions, results: Results) -> None:
    """Train a judge: which of the draft model's tokens change the target's answer?

    After Ctrl-C the judge is trained on the problems that were finished.
    """
    with needing("training", "models"):
        from flyspec_lab.training import judge
    results.of(lambda: judge.train(options))
