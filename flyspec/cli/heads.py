"""`flyspec heads`: trains draft heads and measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.results import BenchReport, Results, notes
from flyspec.errors import ConfigError
from flyspec.lab.heads.options import HeadTrainOptions

if TYPE_CHECKING:
    from flyspec.lab.heads.train import TrainedHead

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Draft heads of a target."""


@app.command("train")
@with_flags
def train(options: HeadTrainOptions, results: Results) -> None:
    """Train an EAGLE-3 head on texts that the target writes."""
    try:
        from flyspec.lab.heads import train as training
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training needs {error.name}; install it with: pip install 'flyspec[lab,models]'"
        ) from None
    results.of(lambda: _trained(training.train(options)))


def _trained(found: TrainedHead) -> BenchReport:
    shares = ", ".join(f"{share:.1%}" for share in found.agreement)
    summary = (
        f"{found.parameters / 1e6:.2f} M parameters, trained on {found.trained_tokens:,} tokens of "
        f"{found.texts:,} texts in {found.steps:,} steps. At the end it had the target's most "
        f"likely token, by unrolled step: {shares}. It can draft {found.coverage:.1%} of the tokens "
        f"it learnt. Writing took {found.writing_s:.0f} s, training {found.training_s:.0f} s. Wrote "
        f"{found.output}."
    )
    return BenchReport(found.document, [notes(summary)])
