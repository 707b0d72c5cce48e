"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyspec.bench.accuracy import ConditionReport
from flyspec.bench.speed import ModeReport
from flyspec.tables import Column, Table, make_table, record_table

if TYPE_CHECKING:  # imports torch
    from flyspec.bench.judging import JudgeReport, RuleCost, SamplingCost

_SPEED: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", "{.tokens_per_second:.0f}"),
    ("x plain", "{.ratio_to_plain:.2f}"),
    ("x best", "{.ratio_to_best:.2f}"),
    ("accepted", "{.mean_accepted_tokens:.2f}"),
    ("loose", "{.loose_share:.1%}"),
    ("overhead", "{.round_overhead_p50_ms:.2f} ms"),
    ("same", "{0.same_as_plain}/{0.prompts}"),
)
SPEED_NOTES = (
    "x plain: rate over that of plain decoding (K = 0, same services), median of the prompts; "
    "x best: over the faster of plain and transformers; accepted: mean tokens a round; "
    "overhead: a round's time outside the models, median; same: texts as plain decoding's"
)
_ANSWERS: tuple[Column, ...] = (("right", "{.accuracy:.1%}"), ("recovery", "{.recovery:.1%}"))
_LIKELIHOOD: tuple[Column, ...] = (("log p", "{.log_likelihood_per_token:.4f}"),)
_ACCEPTED: tuple[Column, ...] = (
    ("accepted", "{.mean_accepted_tokens:.2f}"),
    ("loose", "{.loose_share:.2%}"),
)
_ACCURACY: tuple[Column, ...] = (
    ("nats a text", lambda r: f"{r.loose_cost_nats / max(1, r.problems):.2f}"),
    ("same", "{0.same_as_plain}/{0.problems}"),
)
_RULES: tuple[Column, ...] = (
    ("gap loose", "{.mean_loose_gap_nats:.2f}"),
    ("gap rejected", "{.mean_rejected_gap_nats:.2f}"),
    ("rollbacks", "{.rollbacks}"),
    ("loops", "{.loops}"),
    ("dist. B", "{.distribution_bytes_per_round:,.0f}"),
)
RULES_NOTES = (
    "right: answers; recovery: over plain decoding's; log p: the target's raw log-probability of "
    "an output token, mean, nats; accepted: mean tokens a round; loose: share of the tokens; "
    "gap: mean of log p(most likely token) - log p(token) of loose and of rejected tokens, nats; "
    "loops: texts that begin to repeat themselves; dist. B: bytes of the drafts' distributions "
    "in a round with drafts, mean"
)


def speed_table(name: str, reports: Sequence[ModeReport]) -> Table:
    """Modes of one group."""
    return record_table(_SPEED, reports, f"{name}, {reports[0].prompts} prompts")


def accuracy_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Conditions over one group, in 80 columns."""
    return _conditions(name, "decoding", _ACCURACY, reports)


def rules_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Rules over one group, with what each took loosely and what it cost."""
    return _conditions(name, "rule", _RULES, reports)


def _conditions(
    name: str, first: str, columns: Sequence[Column], reports: Sequence[ConditionReport]
) -> Table:
    """How good the texts are by answers, or by the target; what was accepted; and `columns`."""
    quality = _LIKELIHOOD if reports[0].accuracy is None else _ANSWERS
    every: list[Column] = [(first, "{.condition}"), *quality, *_ACCEPTED, *columns]
    return record_table(every, reports, f"{name}, {reports[0].problems} problems")


def judge_tables(report: JudgeReport) -> list[Table]:
    """One table for each way of sampling, and one for sampling alone."""
    layers = [layer.num_speculative_tokens for layer in report.layers]
    tables = []
    for sampling in dict.fromkeys(cost.sampling for cost in report.rules):
        costs = [cost for cost in report.rules if cost.sampling == sampling]
        rows = []
        for rule in dict.fromkeys(cost.rule for cost in costs):
            row = [rule]
            for k in layers:
                found = {
                    c.matching: c for c in costs if c.rule == rule and c.num_speculative_tokens == k
                }
                row += [_cost(found[True]), _cost(found[False]), found[False].outcome.lower()]
            rows.append(row)
        columns = [head for k in layers for head in (f"K = {k}, all match", "a mismatch", "")]
        tables.append(make_table(["rule", *columns], rows, f"judging, {sampling}"))
    alone = [
        [what, *(_cost(c) for k in layers for c in report.sampling
                 if c.what == what and c.num_speculative_tokens == k)]
        for what in dict.fromkeys(cost.what for cost in report.sampling)
    ]  # fmt: skip
    return [*tables, make_table(["", *(f"K = {k}" for k in layers)], alone, "sampling alone")]


def _cost(cost: RuleCost | SamplingCost) -> str:
    return f"{cost.median_ns / 1e6:.2f} ms {cost.share_of_layer:6.1%}"
