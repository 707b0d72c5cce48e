"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.accuracy import AccuracyReport
from bench.speed import ModeReport


def speed_table(name: str, reports: Sequence[ModeReport]) -> Table:
    """Modes of one group."""
    table = Table(title=f"{name}, {reports[0].prompts} prompts", title_justify="left")
    table.add_column("mode")
    for column in ("tok/s", "x plain", "x best", "accepted", "loose", "overhead", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        overhead = r.round_overhead_p50_ms
        table.add_row(
            r.mode,
            f"{r.tokens_per_second:.0f}",
            f"{r.ratio_to_plain:.2f}",
            f"{r.ratio_to_best:.2f}",
            f"{r.mean_accepted_tokens:.2f}",
            f"{r.loose_share:.1%}",
            "-" if overhead is None else f"{overhead:.2f} ms",
            f"{r.same_as_plain}/{r.prompts}",
        )
    return table


SPEED_NOTES = (
    "x plain: rate over that of plain decoding (K = 0, same services), median of the prompts; "
    "x best: over the faster of plain and transformers; accepted: mean tokens a round; "
    "overhead: a round's time outside the models, median; same: texts as plain decoding's"
)


def accuracy_table(name: str, reports: Sequence[AccuracyReport]) -> Table:
    """Conditions over one group."""
    table = Table(title=f"{name}, {reports[0].problems} problems", title_justify="left")
    table.add_column("decoding")
    for column in ("right", "recovery", "accepted", "loose", "nats a text", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            r.condition,
            f"{r.accuracy:.1%}",
            "-" if r.recovery is None else f"{r.recovery:.1%}",
            f"{r.mean_accepted_tokens:.2f}",
            f"{r.loose_share:.2%}",
            f"{r.loose_cost_nats:.2f}",
            f"{r.same_as_plain}/{r.problems}",
        )
    return table
