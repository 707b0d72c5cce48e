"""Conditions over the same problems: quality, what was accepted loosely, what it saved.

Recovery is the score under a rule relative to that of plain decoding. Where no answers are known,
the mean raw log-probability that the target gives a text's tokens is its quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyspec_lab.answered import ROUNDS, TIME, Answered, Row
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.curves import is_exact
from flyspec_lab.describe import ends_in_loop
from flyspec_lab.statistics import Array, Flips, Interval, mcnemar_p, ratio, upper_bound

QUANTILES = (0.5, 0.9, 0.99, 1.0)
GAP_EDGES_NATS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Starts of the bins of gaps; the last one has no end. They are narrow where thresholds lie."""


@dataclass(frozen=True)
class GapCounts:
    """Counts of loose tokens and of rejected mismatches in each bin of gaps.

    A gap is the cost of a token in nats: raw log p(most likely token) - log p(token).
    """

    loose: tuple[int, ...]
    rejected: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> GapCounts:
        """Count those of samples; what an older sample lacks is not counted."""
        counts = []
        for name in ("loose_gaps_nats", "rejected_gaps_nats"):
            # Rounding may leave a gap of two equal probabilities below 0.
            gaps = np.maximum(_all(rows, name), 0.0)
            counts.append(tuple(map(int, np.histogram(gaps, (*GAP_EDGES_NATS, np.inf))[0])))
        return cls(*counts)


@dataclass(frozen=True)
class Costs:
    """Quantiles of costs in nats: the median, 90 %, 99 % and the largest; None if there are none.

    `loose`: of one loose token. `text`: of all loose tokens of a text.
    """

    loose: tuple[float, ...] | None
    text: tuple[float, ...] | None


@dataclass(frozen=True)
class RoundTimes:
    """Means per round, in ms: drafting, the target's forward pass, the rule, and all of it.

    The first round's include the prompt. `judge_ms` is None in samples from before it was recorded.
    """

    draft_ms: float
    verify_ms: float
    judge_ms: float | None
    round_ms: float

    @property
    def rest_ms(self) -> float:
        """Time of none of the three: messages, tokens to text, waiting for other requests."""
        return self.round_ms - self.draft_ms - self.verify_ms - (self.judge_ms or 0.0)


@dataclass(frozen=True)
class Versus:
    """A condition against another one, `of`, on the same problems.

    `won` counts answers that only this one got right, `lost` those that only `of` did; None without
    known answers, as is `mcnemar_p`. The differences are means over all texts: of the score, and of
    the share of loose tokens.
    """

    of: str
    won: int | None
    lost: int | None
    mcnemar_p: float | None
    score_difference: Interval | None
    loose_share_difference: Interval | None


@dataclass(frozen=True)
class ConditionReport:
    """A condition over all problems that every condition has answered.

    `correct`, `accuracy`, `recovery` and `flips` (against plain decoding) are None without known
    answers; then `log_likelihood_per_token` is known, in nats. Gaps are means in nats, None if
    there was no such token. `loops` counts texts that repeat themselves by the loop guard's
    criterion, whether it was on or not, `ending_loops` those that do so to their end, `new_loops`
    those that do not under `speed_base` with the same seed; `loop_rate_upper` and
    `new_loop_rate_upper` are exact one-sided 95 % bounds, for these prompts. `distinct_1` to
    `distinct_3` (means) and `broken_endings` are as in `flyspec_lab.describe`.
    `mean_accepted_tokens` is tokens per round, where each plain token is a round; `speed` is tokens
    per second of a request, one of `concurrency` at a time. `mean_accepted_tokens_ratio` and
    `speed_ratio` are their ratios to those of `speed_base`: `exact` with the same K and drafter, or
    plain decoding where that was not compared; `speedup` is the ratio of `speed` to plain
    decoding's. `failed` samples are left out everywhere.
    """

    task: str
    condition: str
    problems: int
    samples: int
    failed: int
    tokens: int
    correct: int | None
    accuracy: Interval | None
    recovery: Interval | None
    flips: Flips | None
    log_likelihood_per_token: float | None
    mean_accepted_tokens: float
    mean_accepted_tokens_interval: Interval | None
    mean_accepted_tokens_ratio: Interval | None
    loose_tokens: int
    loose_share: float
    loose_cost_nats: float
    costs: Costs
    mean_loose_gap_nats: float | None
    mean_rejected_gap_nats: float | None
    gaps: GapCounts
    rollbacks: int
    loops: int
    loop_rate_upper: float
    ending_loops: int
    new_loops: int | None
    new_loop_rate_upper: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    broken_endings: int
    distribution_bytes_per_round: float
    speed: float
    speed_base: str | None
    speed_ratio: Interval | None
    speedup: Interval | None
    times: RoundTimes
    same_as_plain: int
    cut_off: int
    versus: Versus | None = None


def report(answered: Answered, first: str = PLAIN) -> list[ConditionReport]:
    """Summarize each arm of a task, and compare it with the one named `first`."""
    names = [arm.name for arm in answered.arms]
    reports = [_condition(answered, name) for name in names] if answered.bootstrap else []
    if first not in names:
        return reports
    return [
        r if r.condition == first else replace(r, versus=versus(answered, r.condition, first))
        for r in reports
    ]


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
    new = None if base is None else _new_loops(answered, name, base)
    return ConditionReport(
        task=answered.task,
        condition=name,
        problems=answered.num_problems,
        samples=samples,
        failed=answered.failed[name],
        tokens=tokens,
        **_quality(answered, name),
        distinct_1=_mean(rows, "distinct_1"),
        distinct_2=_mean(rows, "distinct_2"),
        distinct_3=_mean(rows, "distinct_3"),
        mean_accepted_tokens=tokens / rounds,
        mean_accepted_tokens_interval=_interval(
            answered, ratio, (name, "num_tokens"), (name, "num_rounds")
        ),
        mean_accepted_tokens_ratio=_ratio_to(answered, name, base, ROUNDS),
        loose_tokens=loose,
        loose_share=loose / max(1, tokens),
        loose_cost_nats=total("loose_cost_nats"),
        costs=Costs(
            _quantiles(_all(rows, "loose_gaps_nats")),
            _quantiles([row["loose_cost_nats"] for row in rows if row["num_loose_tokens"]]),
        ),
        mean_loose_gap_nats=total("loose_cost_nats") / loose if loose else None,
        mean_rejected_gap_nats=total("rejected_cost_nats") / rejected if rejected else None,
        gaps=GapCounts.of(rows),
        rollbacks=int(total("num_rollbacks")),
        loops=sum(loops),
        loop_rate_upper=upper_bound(sum(loops), samples),
        ending_loops=sum(ends_in_loop(row["token_ids"]) for row in rows),
        new_loops=new,
        new_loop_rate_upper=None if new is None else upper_bound(new, samples),
        broken_endings=sum(row["broken_ending"] is not None for row in rows),
        distribution_bytes_per_round=total("distribution_bytes") / max(1.0, steps),
        speed=tokens / max(1e-9, total("total_ns") / 1e9),
        speed_base=base,
        speed_ratio=_ratio_to(answered, name, base, TIME),
        speedup=_ratio_to(answered, name, None if plain is None else PLAIN, TIME),
        times=_round_times(answered, name, rounds),
        same_as_plain=sum(
            row["token_ids"] == p["token_ids"] for row, p in zip(rows, plain or (), strict=False)
        ),
        cut_off=sum(row["finish_reason"] == "LENGTH" for row in rows),
    )


def _round_times(answered: Answered, name: str, rounds: float) -> RoundTimes:
    draft, verify, judge, whole = (
        answered.column(name, column).sum() / 1e6 / rounds
        for column in ("draft_model_ns", "target_model_ns", "judge_ns", "total_ns")
    )
    known = None if np.isnan(judge) else float(judge)
    return RoundTimes(float(draft), float(verify), known, float(whole))


def _quality(answered: Answered, name: str) -> dict[str, Any]:
    likelihood = answered.column(name, "log_likelihood")
    tokens = sum(len(row["token_ids"]) for row in answered.rows[name])
    found: dict[str, Any] = {
        "correct": None, "accuracy": None, "recovery": None, "flips": None,
        "log_likelihood_per_token":
            None if np.isnan(likelihood).any() else float(likelihood.sum()) / max(1, tokens),
    }  # fmt: skip
    if not answered.has_answers:
        return found
    found |= {
        "correct": int((answered.column(name, "score") >= 1.0).sum()),
        "accuracy": _interval(answered, ratio, (name, "score"), (name, "one")),
    }
    if PLAIN in answered.rows:
        found |= {
            "recovery": _interval(answered, ratio, (name, "score"), (PLAIN, "score")),
            "flips": Flips.of(_right(answered, name), _right(answered, PLAIN)),
        }
    return found


def _right(answered: Answered, name: str) -> NDArray[np.bool_]:
    """Return whether the first text of each problem is right."""
    return answered.column(name, "score")[answered.first] >= 1.0


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


def _new_loops(answered: Answered, name: str, base: str) -> int:
    pairs = zip(answered.rows[name], answered.rows[base], strict=True)
    return sum(_loops(here) and not _loops(there) for here, there in pairs)


def _loops(row: Row) -> bool:
    return row["loop_token_index"] is not None or row["loop_guard_token_index"] is not None


def versus(answered: Answered, name: str, first: str) -> Versus:
    """Compare an arm with another one, problem by problem."""

    def difference(column: str) -> Interval | None:
        columns = [(arm, of) for arm in (name, first) for of in (column, "one")]
        return _interval(
            answered, lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3], *columns
        )

    shares = difference("loose share")
    if not answered.has_answers:
        return Versus(first, None, None, None, None, shares)
    right, there = _right(answered, name), _right(answered, first)
    won, lost = int((right & ~there).sum()), int((~right & there).sum())
    return Versus(first, won, lost, mcnemar_p(won, lost), difference("score"), shares)


def _interval(answered: Answered, statistic: Any, *columns: tuple[str, str]) -> Interval | None:
    """Return a statistic of columns, each of an arm, with its interval over the problems."""
    assert answered.bootstrap is not None

    def values(arm: str, name: str) -> Array:
        if name == "one":
            return np.ones(len(answered.rows[arm]))
        if name == "loose share":
            tokens = answered.column(arm, "num_tokens")
            return answered.column(arm, "num_loose_tokens") / np.maximum(1.0, tokens)
        return answered.column(arm, name)

    return answered.bootstrap.interval(
        answered.per_problem(*(values(*column) for column in columns)), statistic
    )


def _all(rows: Sequence[Row], name: str) -> Array:
    """Return the values in a column of lists; null is an empty one."""
    return np.array([value for row in rows for value in row[name] or ()], float)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(known)) if known else None


def _quantiles(values: Sequence[float] | Array) -> tuple[float, ...] | None:
    return tuple(map(float, np.quantile(values, QUANTILES))) if len(values) else None
