"""`flyspec autojudge`: trains the judge of the rule `autojudge`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import needing
from flyspec.concurrency import whatever_reached
from flyspec_lab.autojudge.options import JudgeTrainOptions
from flyspec_lab.report import Report, Results

if TYPE_CHECKING:
    from flyspec_lab.autojudge.train import Trained

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
        from flyspec_lab.autojudge import train as training
    results.of(lambda: whatever_reached(lambda: training.train(options), _report))


def _report(found: Trained) -> Report:
    from flyspec.tables import record_table

    facts = found.judge.facts
    table = record_table(
        [
            ("threshold", "{.threshold:.4f}"),
            ("important rejected", "{.recall:.1%}"),
            ("accepted", "{.accepted:.1%}"),
            (
                "rejected are important",
                lambda p: "–" if p.precision is None else f"{p.precision:.1%}",
            ),
        ],
        facts.thresholds,
        title=f"Thresholds on {facts.held_out_labels:,} mismatches of "
        f"{facts.held_out_prompts:,} held-out prompts",
    )
    summary = (
        f"AUC {facts.auc:.3f} on held-out prompts ({facts.train_auc:.3f} on the others). "
        f"{facts.labels:,} mismatches of {facts.prompts:,} prompts, "
        f"{facts.important / facts.labels:.1%} important; C {facts.regularization:.2g}. "
        f"Own threshold {facts.threshold:.4f}: rejects {facts.target_recall:.0%} of the important "
        f"ones. Mining took {found.mining_s:.0f} s, training {found.training_s:.0f} s. "
        f"Wrote {found.file}; serve it with --autojudge-file and --rule autojudge."
    )
    return Report(found.document, [table, summary], found.samples)
