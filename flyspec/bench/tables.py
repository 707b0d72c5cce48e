"""Reports as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flyspec.bench.accuracy import ConditionReport
from flyspec.bench.conditions import PLAIN
from flyspec.bench.report import LONG_PROMPT, BatchReport, ModeReport
from flyspec.tables import Column, Table, cell, make_table, record_table

if TYPE_CHECKING:  # imports torch
    from flyspec.bench.judging import JudgeReport, RuleCost, SamplingCost

_SPEED: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("tok/s", "{.tokens_per_second:.0f}"),
    ("x plain", "{.ratios[plain].median:.2f}"),
    ("95 %", "{0.ratios[plain].low:.2f}-{0.ratios[plain].high:.2f}"),
    ("worst", "{.ratios[plain].worst:.2f}"),
    ("first", "{.first_token_ms:.1f} ms"),
    ("a round", "{.mean_accepted_tokens:.2f}"),
    ("bound", "{.bound:.2f}"),
    ("reached", "{.bound_share:.0%}"),
    ("same", lambda r: "-" if r.same_as_plain is None else f"{r.same_as_plain}/{r.prompts}"),
)
SPEED_NOTES = (
    "x plain: rate over that of plain decoding (K = 0, same services), median of the prompts, and "
    "its bootstrap interval; worst: of the slowest prompt; first: time to the first token; "
    "a round: tokens; bound: what x plain would be if only the target took time; "
    "same: texts as plain's; against others: rate over theirs, and the interval's lower end"
)
_ROUNDS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("accepted", "{.mean_acceptance_length:.2f}"),
    ("loose", "{.loose_share:.1%}"),
    ("overhead", "{.round_overhead_p50_ms:.2f} ms"),
    ("target", "{.target_share:.0%}"),
    ("draft", "{.draft_share:.0%}"),
    ("x first", "{.first_token_ratio:.2f}"),
    ("long", "{.first_token_long_ms:.1f} ms"),
    ("x long", "{.first_token_long_ratio:.2f}"),
    ("chosen", lambda r: ", ".join(
        f"{number} {name.rpartition(', ')[2]}" for name, number in Counter(r.chosen).most_common()
    )),
)  # fmt: skip
ROUNDS_NOTES = (
    "accepted: 1 + drafts that stood, a round with drafts; overhead: a round's time outside the "
    "models; target, draft: their share of the time; x first: time to the first token over "
    f"plain's; long: the same of prompts over {LONG_PROMPT} tokens"
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
_VERSUS: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("won", "{.versus.won:d}"),
    ("lost", "{.versus.lost:d}"),
    ("McNemar p", "{.versus.mcnemar_p:.3f}"),
    ("loose, more", "{.versus.loose_share_difference:+.2%}"),
    ("95 %", "{0.versus.low:+.2%} to {0.versus.high:+.2%}"),
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


def speed_tables(
    name: str, reports: Sequence[ModeReport], others: Sequence[str] = ()
) -> list[Table]:
    """One group: all modes against plain decoding; rounds; flyspec's modes against others."""
    ours = [r for r in reports if r.mode not in others]
    shown = [record_table(_SPEED, reports, f"{name}, {reports[0].prompts} prompts")]
    if any(r.draft_share or r.chosen for r in ours):
        columns = [c for c in _ROUNDS if any(cell(c[1], r) not in ("", "-") for r in ours)]
        shown.append(record_table(columns, [r for r in ours if r.mode != PLAIN], "rounds"))
    if others:
        columns = [("mode", "{.mode}"), *((other, _over(other)) for other in others)]
        shown.append(record_table(columns, ours, "against others"))
    return shown


def worst_prompts(
    reports: Sequence[ModeReport], where: Sequence[str], others: Sequence[str] = ()
) -> str:
    """The slowest prompt of each of flyspec's modes against plain decoding, by name."""
    return "; ".join(
        f"{r.mode} {r.ratios[PLAIN].worst:.2f} at {where[r.ratios[PLAIN].worst_prompt]}"
        for r in reports
        if r.mode != PLAIN and r.mode not in others and not r.chosen
    )


def batch_table(reports: Sequence[BatchReport]) -> Table:
    """Requests at once, of all groups: tokens a second, and against plain decoding."""
    batches = sorted({r.batch for r in reports})
    rows = []
    for group, mode in dict.fromkeys((r.group, r.mode) for r in reports):
        of = {r.batch: r for r in reports if (r.group, r.mode) == (group, mode)}
        rows.append([group, mode, *(
            f"{of[b].tokens_per_second:.0f} ({of[b].ratio_to_plain:.2f})" for b in batches
        )])  # fmt: skip
    columns = ["group", "mode", *(f"{b} at once" for b in batches)]
    return make_table(columns, rows, "tokens/s (x plain) of requests at once", left=2)


def _over(other: str) -> Callable[[ModeReport], str]:
    return lambda r: f"{r.ratios[other].median:.2f} ({r.ratios[other].low:.2f})"


def accuracy_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Conditions over one group, in 80 columns."""
    return _conditions(name, "decoding", _ACCURACY, reports)


def rules_table(name: str, reports: Sequence[ConditionReport]) -> Table:
    """Rules over one group, with what each took loosely and what it cost."""
    return _conditions(name, "rule", _RULES, reports)


def versus_table(reports: Sequence[ConditionReport]) -> Table:
    """Each condition against the first that was named, prompt by prompt."""
    compared = [r for r in reports if r.versus]
    return record_table(_VERSUS, compared, f"against {compared[0].versus.of}")  # type: ignore[union-attr]


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
