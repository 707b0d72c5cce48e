"""`flyspec heads`: trains draft heads and measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import needing
from flyspec.concurrency import whatever_reached
from flyspec_lab.heads.options import HeadMeasureOptions, HeadTrainOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec_lab.heads.measure import Measured
    from flyspec_lab.heads.train import TrainedHead

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
        from flyspec_lab.heads import train as training
    results.of(lambda: whatever_reached(lambda: training.train(options), _trained))


@app.command("measure")
@with_flags
def measure(options: HeadMeasureOptions, results: Results) -> None:
    """Measure tokens per round of a head on the target's own text, beside a draft model."""
    with needing("measuring", "models"):
        from flyspec_lab.heads import measure as measuring
    results.of(lambda: _measured(options, measuring.measure(options)))


def _trained(found: TrainedHead) -> Report:
    shares = ", ".join(f"{share:.1%}" for share in found.agreement)
    summary = (
        f"{found.parameters / 1e6:.2f} M parameters, trained on {found.trained_tokens:,} tokens of "
        f"{found.texts:,} texts in {found.steps:,} steps. At the end it had the target's most "
        f"likely token, by unrolled step: {shares}. It can draft {found.coverage:.1%} of the "
        f"tokens it learnt. Writing took {found.writing_s:.0f} s, training {found.training_s:.0f} "
        f"s. Wrote {found.output}."
    )
    return Report(vars(found), [summary])


def _measured(o: HeadMeasureOptions, found: list[Measured]) -> Report:
    from flyspec.tables import record_table

    columns: list[tuple[str, Any]] = [
        ("text", "{.corpus}"), ("drafter", "{.drafter}"), ("tokens", "{.tokens:,}"),
    ]  # fmt: skip
    for i, k in enumerate(o.k):
        columns.append((f"K = {k}", lambda row, i=i: f"{row.tokens_per_round[i]:.2f}"))
    table = record_table(columns, found, title="Tokens per round on the target's greedy text")
    return Report({"k": o.k, "rows": found}, [table])
