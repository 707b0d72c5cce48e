"""The section of a task in the reports of `flyspec eval` and `flyspec study`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from flyspec.tables import Column, FittedTable, rate, record_table
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.evaluation import Found
from flyspec_lab.report import Section
from flyspec_lab.statistics import upper_bound


def _part(path: str, form: str) -> Callable[[Any], str]:
    """Return a column's form for a part of a record, which may be None."""
    part = attrgetter(path)
    return lambda record: "-" if part(record) is None else form.format(part(record))


def _rate(name: str) -> Callable[[ConditionReport], str]:
    """Return a column's form for a count of texts, with the bound of their rate."""

    def shown(r: ConditionReport) -> str:
        count = getattr(r, name)
        return "-" if count is None else f"{count} (< {upper_bound(count, r.samples):.1%})"

    return shown


_ANSWERS: tuple[Column, ...] = (
    ("correct", _part("accuracy", "{.value:.1%}")),
    ("recovery", _part("recovery", "{.value:.1%}")),
    ("95 %", _part("recovery", "{0.low:.1%} to {0.high:.1%}")),
)
_FIGURES: tuple[Column, ...] = (
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("x base", _part("mean_accepted_tokens_ratio", "{.value:.3f}")),
    ("95 %", _part("mean_accepted_tokens_ratio", "{0.low:.3f} to {0.high:.3f}")),
    ("loose", "{.loose_share:.2%}"),
    ("tok/s", lambda r: rate(r.speed)),
    ("x base", _part("speed_ratio", "{.value:.3f}")),
    ("95 %", _part("speed_ratio", "{0.low:.3f} to {0.high:.3f}")),
    ("gap loose", "{.mean_loose_gap_nats:.2f}"),
    ("90 %", "{.loose_gap_nats_90:.2f}"),
    ("gap rejected", "{.mean_rejected_gap_nats:.2f}"),
    ("rollbacks", "{.rollbacks}"),
    ("loops", _rate("loops")),
    ("new", _rate("new_loops")),
    ("cut off", "{.cut_off}"),
    ("log p", "{.log_likelihood_per_token:.4f}"),
    ("same", "{0.same_as_plain}/{0.samples}"),
    ("dist. B", "{.distribution_bytes_per_round:,.0f}"),
)
_FIGURES_NOTES = (
    "Correct: answers; recovery: relative to plain decoding's; 95 %: bootstrap interval; loose: "
    "share of tokens; x: tokens per round, and per second, relative to it; gap: mean of log p(most "
    "likely token) - log p(token) of loose (and its 90 % quantile) and of rejected tokens, nats; "
    "loops: texts that start to repeat themselves, new: and do not under `exact` with the same "
    "seed, each with the exact 95 % bound of its rate (Clopper and Pearson); cut off: by the limit "
    "of tokens; log p: the target's mean raw log-probability per token, nats; same: texts that are "
    "plain decoding's; dist. B: bytes of the drafts' distributions per round with drafts, mean."
)
_TIMES: tuple[Column, ...] = (
    ("rule", "{.condition}"),
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("draft", "{.draft_ms:.2f} ms"),
    ("verify", "{.verify_ms:.2f} ms"),
    ("gate", "{.judge_ms:.2f} ms"),
    ("rest", lambda r: f"{r.round_ms - r.draft_ms - r.verify_ms - r.judge_ms:.2f} ms"),
    ("round", "{.round_ms:.2f} ms"),
    ("tok/s", lambda r: rate(r.speed)),
    (f"x {PLAIN}", _part("speedup", "{.value:.2f}")),
    ("95 %", _part("speedup", "{0.low:.2f} to {0.high:.2f}")),
)
_TIMES_NOTES = (
    "One request at a time; all conditions of a problem run one after the other. Draft: in the "
    "draft model; verify: the target's forward pass; gate: sampling and the rule; rest: messages "
    "between the services, tokens to text and waiting; all are means per round, the prompt "
    "included."
)
_FLIPS: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("harmful", "{0.flips.harmful}/{0.flips.right_there}"),
    ("helpful", "{.flips.helpful}"),
    ("recovery >", lambda r: f"{1.0 - r.flips.harmful_rate_upper:.1%}"),
    ("McNemar p", "{.flips.mcnemar_p:.3f}"),
)
_FLIPS_NOTES = (
    "Harmful: right answers of plain decoding that became wrong; helpful: wrong ones that became "
    "right; recovery >: exact one-sided 95 % bound, as if none were helpful. These count "
    "problems, by the first text of each; recoveries are over all texts."
)
_EQUAL: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("against", "{.of}"),
    ("equal tok/round", _part("acceptance", "{.difference:+.2%}")),
    ("95 %", _part("acceptance", "{0.low:+.2%} to {0.high:+.2%}")),
    ("equal tok/s", _part("speed", "{.difference:+.2%}")),
    ("95 %", _part("speed", "{0.low:+.2%} to {0.high:+.2%}")),
)
_EQUAL_NOTES = (
    "At equal cost: difference of the score from the other rule's, its thresholds (and exact) "
    "joined by lines, where both have the same tokens per round, or per second. Random allocation: "
    "from the straight line between the large model (decoding plainly, or speculating exactly) and "
    "the rival alone, as if each problem went to one of them at random; beyond the rival's speed, "
    "from the rival's score."
)


def task_section(found: Found, times: bool = False) -> Section:
    """Return the tables of a task's conditions, and what their columns mean.

    With `times`, those of a round's parts as well.
    """
    title, reports = found.task, found.reports
    if not reports:
        return Section(title, ["No problem has an answer under every condition yet."])
    changed = [r for r in reports[1:] if r.flips]
    every = (
        (_FIGURES_NOTES, figures_table(title, reports)),
        (_TIMES_NOTES, record_table(_TIMES, reports if times else (), "times of a round")),
        (_FLIPS_NOTES, record_table(_FLIPS, changed, f"answers against {reports[0].condition}")),
        (_EQUAL_NOTES, record_table(_EQUAL, found.equal_costs, "at equal cost", left=2)),
    )
    shown = [(notes, table) for notes, table in every if table.rows]
    return Section(title, [notes for notes, _ in shown], [table for _, table in shown])


def figures_table(title: str, reports: Sequence[ConditionReport]) -> FittedTable:
    """Return the right answers of conditions, if there are any, acceptance and speed."""
    answers = () if reports[0].accuracy is None else _ANSWERS
    base = "exact" if any(r.speed_base not in (None, PLAIN) for r in reports) else PLAIN
    columns = [("decoding", "{.condition}"), *answers, *_FIGURES]
    named: list[Column] = [(name.replace("base", base), form) for name, form in columns]
    texts = f", {reports[0].samples} texts" if reports[0].samples != reports[0].problems else ""
    return record_table(named, reports, f"{title}, {reports[0].problems} problems{texts}")
