"""Conditions over the same problems: quality, what was accepted loosely, what it saved.

Recovery is the score under a rule relative to that of plain decoding. Where no answers are known,
the mean raw log-probability that the target gives a text's tokens is its quality.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flyspec_lab.answered import ROUNDS, TIME, Answered, Row
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.curves import is_exact
from flyspec_lab.statistics import Array, Flips, Interval, ratio


@dataclass(frozen=True)
class ConditionReport:
    """A condition over all problems that every condition has answered.

    `accuracy`, `recovery` and `flips` (against plain decoding) are None without known answers; then
    `log_likelihood_per_token` is known, in nats. Gaps are in nats: raw log p(most likely token) -
    log p(token), None if there was no such token. `loops` counts texts that repeat themselves by
    the loop guard's criterion, whether it was on or not, `new_loops` those that do not under
    `speed_base` with the same seed.
    `mean_accepted_tokens` is tokens per round, where each plain token is a round; `speed` is tokens
    per second of a request, one of `concurrency` at a time. `mean_accepted_tokens_ratio` and
    `speed_ratio` are their ratios to those of `speed_base`: `exact` with the same K and drafter, or
    plain decoding where that was not compared; `speedup` is the ratio of `speed` to plain
    decoding's. `failed` samples are left out everywhere. `draft_ms`, `verify_ms`
    (the target's forward pass), `judge_ms` (the rule) and `round_ms` (all of it) are means per
    round, the prompt included.
    """

    task: str
    condition: str
    problems: int
    samples: int
    failed: int
    tokens: int
    accuracy: Interval | None
    recovery: Interval | None
    flips: Flips | None
    log_likelihood_per_token: float | None
    mean_accepted_tokens: float
    mean_accepted_tokens_interval: Interval | None
    mean_accepted_tokens_ratio: Interval | None
    loose_tokens: int
    loose_share: float
    mean_loose_gap_nats: float | None
    loose_gap_nats_90: float | None
    mean_rejected_gap_nats: float | None
    rollbacks: int
    loops: int
    new_loops: int | None
    distribution_bytes_per_round: float
    speed: float
    speed_base: str | None
    speed_ratio: Interval | None
    speedup: Interval | None
    draft_ms: float
    verify_ms: float
    judge_ms: float
    round_ms: float
    same_as_plain: int
    cut_off: int


def report(answered: Answered) -> list[ConditionReport]:
    """Summarize each arm of a task."""
    return [_condition(answered, arm.name) for arm in answered.arms] if answered.places else []


def _condition(answered: Answered, name: str) -> ConditionReport:
    rows = answered.rows[name]

    def total(column: str) -> float:
        return float(np.nansum(answered.column(name, column)))

    samples, tokens = len(rows), int(total("num_tokens"))
    steps, rounds = total("num_spec_steps"), max(1.0, total("num_rounds"))
    loose, rejected = int(total("num_loose_tokens")), int(total("num_rejected_tokens"))
    loops = list(map(_loops, rows))
    plain = answered.rows.get(PLAIN)
    base = _speed_base(answered, name)
    gaps = [gap for row in rows for gap in row["loose_gaps_nats"]]
    of_base = None if base is None else list(map(_loops, answered.rows[base]))
    return ConditionReport(
        task=answered.task,
        condition=name,
        problems=answered.num_problems,
        samples=samples,
        failed=answered.failed[name],
        tokens=tokens,
        **_quality(answered, name),
        mean_accepted_tokens=tokens / rounds,
        mean_accepted_tokens_interval=_interval(
            answered, ratio, (name, "num_tokens"), (name, "num_rounds")
        ),
        mean_accepted_tokens_ratio=_ratio_to(answered, name, base, ROUNDS),
        loose_tokens=loose,
        loose_share=loose / max(1, tokens),
        mean_loose_gap_nats=total("loose_cost_nats") / loose if loose else None,
        loose_gap_nats_90=float(np.quantile(gaps, 0.9)) if gaps else None,
        mean_rejected_gap_nats=total("rejected_cost_nats") / rejected if rejected else None,
        rollbacks=int(total("num_rollbacks")),
        loops=sum(loops),
        new_loops=None if of_base is None else sum(map(operator.gt, loops, of_base)),
        distribution_bytes_per_round=total("distribution_bytes") / max(1.0, steps),
        speed=tokens / max(1e-9, total("total_ns") / 1e9),
        speed_base=base,
        speed_ratio=_ratio_to(answered, name, base, TIME),
        speedup=_ratio_to(answered, name, None if plain is None else PLAIN, TIME),
        draft_ms=total("draft_model_ns") / 1e6 / rounds,
        verify_ms=total("target_model_ns") / 1e6 / rounds,
        judge_ms=total("judge_ns") / 1e6 / rounds,
        round_ms=total("total_ns") / 1e6 / rounds,
        same_as_plain=sum(
            row["token_ids"] == p["token_ids"] for row, p in zip(rows, plain or (), strict=False)
        ),
        cut_off=sum(row["finish_reason"] == "LENGTH" for row in rows),
    )


def _quality(answered: Answered, name: str) -> dict[str, Any]:
    likelihood = answered.column(name, "log_likelihood")
    tokens = sum(len(row["token_ids"]) for row in answered.rows[name])
    known, compared = answered.has_answers, answered.has_answers and PLAIN in answered.rows
    score = name, "score"
    return {
        "log_likelihood_per_token":
            None if np.isnan(likelihood).any() else float(likelihood.sum()) / max(1, tokens),
        "accuracy": _interval(answered, ratio, score, (name, "one")) if known else None,
        "recovery": _interval(answered, ratio, score, (PLAIN, "score")) if compared else None,
        "flips": flips(answered, name, PLAIN) if compared else None,
    }  # fmt: skip


def flips(answered: Answered, name: str, other: str) -> Flips:
    """Compare the answers of two arms: those of the first text of each problem."""
    right, there = (answered.column(arm, "score")[answered.first] >= 1.0 for arm in (name, other))
    return Flips.of(right, there)


def _speed_base(answered: Answered, name: str) -> str | None:
    """Return the condition that a speed is relative to; None if it is that one itself."""
    (arm,) = (arm for arm in answered.arms if arm.name == name)
    exact = [other for other in answered.arms if is_exact(other) and other.k != 0]
    alike = [o.name for o in exact if (o.k, o.drafter) == (arm.k, arm.drafter)]
    plain = [PLAIN] if PLAIN in answered.rows else []
    base = next(iter([*alike, *(o.name for o in exact[:1]), *plain]), None)
    return None if base == name else base


def _ratio_to(answered: Answered, name: str, base: str | None, spent: str) -> Interval | None:
    """Return the ratio of two conditions' tokens per what they spent."""
    if base is None:
        return None
    columns = [(arm, column) for arm in (name, base) for column in ("num_tokens", spent)]
    return _interval(answered, lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), *columns)


def _loops(row: Row) -> bool:
    return row["loop_token_index"] is not None or row["loop_guard_token_index"] is not None


def score_difference(answered: Answered, name: str, other: str) -> Interval | None:
    """Return the mean score of an arm less that of another; None without known answers."""
    if not answered.has_answers:
        return None
    columns = [(arm, of) for arm in (name, other) for of in ("score", "one")]
    return _interval(answered, lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3], *columns)


def _interval(answered: Answered, statistic: Any, *columns: tuple[str, str]) -> Interval | None:
    """Return a statistic of columns, each of an arm, with its interval over the problems."""
    assert answered.bootstrap is not None

    def values(arm: str, name: str) -> Array:
        return np.ones(len(answered.places)) if name == "one" else answered.column(arm, name)

    return answered.bootstrap.interval(
        answered.per_problem(*(values(*column) for column in columns)), statistic
    )
