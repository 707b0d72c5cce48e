"""Reports of `flyspec eval` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from flyspec.tables import Column, FittedTable, make_table, record_table
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AllocationLead, EqualCost


def _part(path: str, form: str) -> Callable[[Any], str]:
    """Return how to render a part of a record, which may be None."""
    part = attrgetter(path)
    return lambda record: "-" if part(record) is None else form.format(part(record))


_ANSWERS: tuple[Column, ...] = (
    ("correct", _part("accuracy", "{.value:.1%}")),
    ("recovery", _part("recovery", "{.value:.1%}")),
    ("95 %", _part("recovery", "{0.low:.1%} to {0.high:.1%}")),
)
_LIKELIHOOD: tuple[Column, ...] = (
    ("log p", "{.log_likelihood_per_token:.4f}"),
    ("distinct-2", "{.distinct_2:.3f}"),
    ("broken", "{.broken_endings}"),
)
_ACCEPTED: tuple[Column, ...] = (
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("loose", "{.loose_share:.2%}"),
)
_SHORT: tuple[Column, ...] = (
    ("nats/text", lambda r: f"{r.loose_cost_nats / max(1, r.samples):.2f}"),
    ("same", "{0.same_as_plain}/{0.samples}"),
)
_BASE = "exact"
"""What speeds are relative to, where it is compared; else plain decoding."""
_RULES: tuple[Column, ...] = (
    ("tok/s", "{.speed:.0f}"),
    (f"x {_BASE}", _part("speed_ratio", "{.value:.2f}")),
    ("gap loose", "{.mean_loose_gap_nats:.2f}"),
    ("90 %", "{.costs.loose[1]:.2f}"),
    ("gap rejected", "{.mean_rejected_gap_nats:.2f}"),
    ("rollbacks", "{.rollbacks}"),
    ("loops", "{0.loops} (< {0.loop_rate_upper:.1%})"),
    ("dist. B", "{.distribution_bytes_per_round:,.0f}"),
)
RULES_NOTES = (
    "correct: answers; recovery: relative to plain decoding's, with its 95 % bootstrap interval; "
    "log p: the target's mean raw log-probability per output token, nats; distinct-2: distinct "
    "pairs of tokens as a share of all; broken: texts cut off; loose: share of tokens; "
    "x: tokens per second relative to it; gap: mean of log p(most likely token) - log "
    "p(token) of loose (and its 90 % quantile) and of rejected tokens, nats; loops: texts that "
    "start to repeat themselves, and the 95 % bound of their rate; dist. B: bytes of the drafts' "
    "distributions per round with drafts, mean"
)
_TIMES: tuple[Column, ...] = (
    ("rule", "{.condition}"),
    ("tok/round", "{.mean_accepted_tokens:.2f}"),
    ("draft", "{.times.draft_ms:.2f} ms"),
    ("verify", "{.times.verify_ms:.2f} ms"),
    ("gate", _part("times.judge_ms", "{:.2f} ms")),
    ("rest", "{.times.rest_ms:.2f} ms"),
    ("round", "{.times.round_ms:.2f} ms"),
    ("tok/s", "{.speed:.0f}"),
    (f"x {PLAIN}", _part("speedup", "{.value:.2f}")),
    ("95 %", _part("speedup", "{0.low:.2f} to {0.high:.2f}")),
)
TIMES_NOTES = (
    "draft: in the draft model; verify: the target's forward pass; gate: sampling and the rule; "
    "rest: messages between the services, tokens to text and waiting; all are means per round, the "
    "prompt included"
)
_FLIPS: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("harmful", "{0.flips.harmful}/{0.flips.right_there}"),
    ("helpful", "{.flips.helpful}"),
    ("recovery >", lambda r: f"{1.0 - r.flips.harmful_rate_upper:.1%}"),
    ("McNemar p", "{.flips.mcnemar_p:.3f}"),
)
FLIPS_NOTES = (
    "harmful: right answers of plain decoding that became wrong; helpful: wrong ones that became "
    "right; recovery >: exact one-sided 95 % bound, as if none were helpful"
)
_VERSUS: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("won", "{.versus.won:d}"),
    ("lost", "{.versus.lost:d}"),
    ("McNemar p", "{.versus.mcnemar_p:.3f}"),
    ("score", _part("versus.score_difference", "{.value:+.2%}")),
    ("more loose", _part("versus.loose_share_difference", "{.value:+.2%}")),
    (
        "95 %",
        _part("versus.loose_share_difference", "{0.low:+.2%} to {0.high:+.2%}"),
    ),
)
_EQUAL: tuple[Column, ...] = (
    ("decoding", "{.condition}"),
    ("against", "{.of}"),
    ("equal tok/round", _part("acceptance", "{.difference:+.2%}")),
    ("95 %", _part("acceptance", "{0.low:+.2%} to {0.high:+.2%}")),
    ("equal tok/s", _part("speed", "{.difference:+.2%}")),
    ("95 %", _part("speed", "{0.low:+.2%} to {0.high:+.2%}")),
)
EQUAL_NOTES = (
    "difference of the score from the other rule's, its thresholds (and exact) joined by lines, "
    "where both have the same tokens per round, or per second"
)
ALLOCATION_NOTES = (
    "difference of the score from that of the straight line between the large model (decoding "
    "plainly, or speculating exactly) and the rival alone at the same tokens per second, as if "
    "each problem went to one of them at random; beyond the rival's speed, from the rival's score"
)


def accuracy_table(name: str, reports: Sequence[ConditionReport]) -> FittedTable:
    """Return the conditions' results on a task, briefly."""
    return _conditions(name, "decoding", _SHORT, reports)


def rules_table(name: str, reports: Sequence[ConditionReport]) -> FittedTable:
    """Return the rules' results on a task, with what each accepted loosely and its cost."""
    return _conditions(name, "rule", _RULES, reports)


def times_table(reports: Sequence[ConditionReport]) -> FittedTable:
    """Return where the time of a round goes, and the speed that comes of it."""
    return record_table(_TIMES, reports, "a round")


def flips_table(reports: Sequence[ConditionReport]) -> FittedTable:
    """Return answers that changed against plain decoding's, with bounds.

    They count problems, by the first text of each; recoveries are over all texts.
    """
    plain = reports[0]
    changed = [r for r in reports if r.flips and r.condition != plain.condition]
    basis = ", first text of each problem" if plain.samples > plain.problems else ""
    return record_table(_FLIPS, changed, f"answers against {plain.condition}{basis}")


def versus_table(reports: Sequence[ConditionReport]) -> FittedTable:
    """Return a comparison of each condition with the first named, problem by problem."""
    compared = [r for r in reports if r.versus]
    return record_table(_VERSUS, compared, f"against {compared[0].versus.of}")  # type: ignore[union-attr]


def equal_table(costs: Sequence[EqualCost]) -> FittedTable:
    return record_table(_EQUAL, costs, "at equal cost", left=2)


def allocation_table(leads: Sequence[AllocationLead]) -> FittedTable:
    """Return each condition's lead over random allocations, a pair of columns for each line."""
    lines = dict.fromkeys((lead.large, lead.small) for lead in leads)
    of = {(lead.condition, lead.large): lead.at for lead in leads}
    columns = ["decoding"]
    for large, small in lines:
        columns += [f"{large} to {small}", "95 %"]
    rows = []
    for condition in dict.fromkeys(lead.condition for lead in leads):
        row = [condition]
        for large, _ in lines:
            at = of.get((condition, large))
            row += ["-", "-"] if at is None else [
                f"{at.difference:+.2%}", f"{at.low:+.2%} to {at.high:+.2%}"
            ]  # fmt: skip
        rows.append(row)
    return make_table(columns, rows, "against a random allocation of problems")


def _conditions(
    name: str, first: str, columns: Sequence[Column], reports: Sequence[ConditionReport]
) -> FittedTable:
    """Return a table of quality (by answers, or by the target), acceptance, and `columns`."""
    quality = _LIKELIHOOD if reports[0].accuracy is None else _ANSWERS
    every: list[Column] = [(first, "{.condition}"), *quality, *_ACCEPTED, *columns]
    if all(r.speed_base in (None, PLAIN) for r in reports):
        every = [(heading.replace(f"x {_BASE}", f"x {PLAIN}"), form) for heading, form in every]
    texts = f", {reports[0].samples} texts" if reports[0].samples != reports[0].problems else ""
    return record_table(every, reports, f"{name}, {reports[0].problems} problems{texts}")
