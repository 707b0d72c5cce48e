"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from flyspec.bench.accuracy import ConditionReport
from flyspec.bench.speed import ModeReport

if TYPE_CHECKING:  # imports torch
    from flyspec.bench.judging import JudgeReport, RuleCost, SamplingCost


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


def accuracy_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Conditions over one group, in 80 columns."""
    table = Table(title=f"{name}, {reports[0].problems} problems", title_justify="left")
    table.add_column("decoding")
    quality = _quality(reports)
    for column in (*quality, "accepted", "loose", "nats a text", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            r.condition,
            *(show(r) for show in quality.values()),
            f"{r.mean_accepted_tokens:.2f}",
            f"{r.loose_share:.2%}",
            f"{r.loose_cost_nats:.2f}",
            f"{r.same_as_plain}/{r.problems}",
        )
    return table


def rules_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Rules over one group, with what each took loosely and what it cost."""
    table = Table(title=f"{name}, {reports[0].problems} problems", title_justify="left")
    table.add_column("rule", overflow="fold")
    quality = _quality(reports)
    columns = ("accepted", "loose", "gap loose", "gap rejected", "rollbacks", "loops", "dist. B")
    for column in (*quality, *columns):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            r.condition,
            *(show(r) for show in quality.values()),
            f"{r.mean_accepted_tokens:.2f}",
            f"{r.loose_share:.2%}",
            _or_dash(r.mean_loose_gap_nats, ".2f"),
            _or_dash(r.mean_rejected_gap_nats, ".2f"),
            str(r.rollbacks),
            str(r.loops),
            f"{r.distribution_bytes_per_round:,.0f}",
        )
    return table


RULES_NOTES = (
    "right: answers; recovery: over plain decoding's; log p: the target's raw log-probability of "
    "an output token, mean, nats; accepted: mean tokens a round; loose: share of the tokens; "
    "gap: mean of log p(most likely token) - log p(token) of loose and of rejected tokens, nats; "
    "loops: texts that begin to repeat themselves; dist. B: bytes of the drafts' distributions "
    "in a round with drafts, mean"
)


def _quality(
    reports: Sequence[ConditionReport],
) -> dict[str, Callable[[ConditionReport], str]]:
    """Columns that say how good the texts are: by answers, or by the target."""
    if reports[0].accuracy is not None:
        return {
            "right": lambda r: _or_dash(r.accuracy, ".1%"),
            "recovery": lambda r: _or_dash(r.recovery, ".1%"),
        }
    return {"log p": lambda r: _or_dash(r.log_likelihood_per_token, ".4f")}


def judge_tables(report: JudgeReport) -> list[Table]:
    """One table for each way of sampling, and one for sampling alone."""
    layers = {layer.num_speculative_tokens: layer for layer in report.layers}
    tables = []
    for sampling in dict.fromkeys(cost.sampling for cost in report.rules):
        table = Table(title=f"judging, {sampling}", title_justify="left")
        table.add_column("rule", no_wrap=True)
        costs = [cost for cost in report.rules if cost.sampling == sampling]
        for k in layers:
            for header in (f"K = {k}, all match", "a mismatch", ""):
                table.add_column(header, justify="right" if header else "left", no_wrap=True)
        for rule in dict.fromkeys(cost.rule for cost in costs):
            cells = []
            for k in layers:
                found = {
                    c.matching: c for c in costs if c.rule == rule and c.num_speculative_tokens == k
                }
                cells += [_cost(found[True]), _cost(found[False]), found[False].outcome.lower()]
            table.add_row(rule, *cells)
        tables.append(table)
    table = Table(title="sampling alone", title_justify="left")
    table.add_column("")
    for k in layers:
        table.add_column(f"K = {k}", justify="right", no_wrap=True)
    for what in dict.fromkeys(cost.what for cost in report.sampling):
        table.add_row(
            what,
            *(_cost(c) for k in layers for c in report.sampling
              if c.what == what and c.num_speculative_tokens == k),
        )  # fmt: skip
    return [*tables, table]


def _cost(cost: RuleCost | SamplingCost) -> str:
    return f"{cost.median_ns / 1e6:.2f} ms {cost.share_of_layer:6.1%}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
