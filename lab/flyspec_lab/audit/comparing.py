"""Differences between a recorded round and the same round judged again, and what explains them.

Where numerics differ, a near-tie may have gone the other way: between two tokens, or between a
number and its threshold. Then a row of logits, changed by no more than the tolerance, gives the
recorded decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import Decision, Outcome, Verdict
from flyspec_lab.audit.report import Discrepancy, DiscrepancyKind
from flyspec_lab.audit.retelling import RetoldRound

TOLERANCE = {"float64": 2.0**-40, "float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""By how much numbers may differ between machines, kernels and batches, by data type of the
weights, as a share of the position's largest raw logit: some units of rounding. In bfloat16 a unit
is 2^-8 of it, which is 0.5 nats at a logit of 128."""
_NUMBERS = ("entropy", "gap_nats", "measure")


class NumberPair(NamedTuple):
    """A recorded number and the target's, at an output token; `scale` is the largest raw logit."""

    token_index: int
    name: str
    recorded: float
    own: float
    scale: float = 1.0

    @property
    def difference(self) -> float:
        """Their absolute difference in single precision, as they are sent; 0 for infinities."""
        one, other = np.float32(self.recorded), np.float32(self.own)
        return 0.0 if one == other else abs(float(one) - float(other))

    def differs(self, tolerance: float) -> bool:
        """True if they differ by more than the tolerance, a share of the scale or of the number.

        Ratios of probabilities can be far larger than logits.
        """
        if not tolerance:
            return self.difference != 0.0  # NaN too
        scale = max(self.scale, abs(self.own) if math.isfinite(self.own) else 0.0)
        return not self.difference <= tolerance * scale

    @property
    def discrepancy(self) -> Discrepancy:
        """The pair as what does not follow."""
        recorded, own = f"{self.name} {self.recorded:.8g}", f"{self.own:.8g}"
        return Discrepancy(DiscrepancyKind.NUMBER, self.token_index, recorded, own)


class RoundComparison(NamedTuple):
    """The first difference of a round, if any, and its numbers up to that.

    A difference is a decision, or the token after them, that turns out differently. `row` is its
    row of logits, and `recorded_token_id` the token that the recording has as the target's own
    there, if it says.
    """

    discrepancy: Discrepancy | None
    numbers: Sequence[NumberPair] = ()
    row: int = 0
    recorded_token_id: int | None = None


def compare(
    round_: RetoldRound,
    verdict: Verdict | Exception,
    prompt_length: int,
    scales: Sequence[float],
) -> RoundComparison:
    """Compare a recorded round with its new verdict. Raises what the model failed with.

    `scales` has the largest raw logit of each row.
    """
    record, index = round_.record, round_.index
    first = record.start_length - prompt_length
    if isinstance(verdict, InvalidArgumentError):
        kind, expected = DiscrepancyKind.RECORD, "a round that can be judged"
        return RoundComparison(Discrepancy(kind, first, str(verdict), expected, index))
    if isinstance(verdict, Exception):
        raise verdict
    found, decided = RoundComparison(None), record.decisions
    for row, (then, now) in enumerate(zip(decided, verdict.decisions, strict=False)):
        draft = record.draft_token_ids[row]
        if (differs := _differs(then, now, draft)) is not None:
            told = Discrepancy(differs, first + row, _told(then), _told(now), index)
            own = draft if then.outcome is Outcome.EXACT else then.target_token_id
            found, decided = RoundComparison(told, (), row, own), decided[:row]
            break
    else:
        found = _compare_ends(round_, verdict, prompt_length)
    numbers = [
        NumberPair(first + row, name, recorded, own, scales[row])
        for row, (then, now) in enumerate(zip(decided, verdict.decisions, strict=False))
        for name in _NUMBERS
        if (recorded := getattr(then, name)) is not None and (own := getattr(now, name)) is not None
    ]
    return found._replace(numbers=numbers)


def _compare_ends(round_: RetoldRound, verdict: Verdict, prompt_length: int) -> RoundComparison:
    """Compare the token after the decisions, and of plain tokens each with the target's own."""
    record = round_.record
    ends = [(each.keep_length, each.next_token_id) for each in (record, verdict)]
    if not record.draft_token_ids:
        # Judged as if they were drafts; a verdict ends at its first EOS, which nothing follows.
        recorded = [*record.plain_token_ids, record.next_token_id, -1]
        ends[0] = verdict.keep_length, recorded[verdict.keep_length - verdict.start_length]
    if ends[0] == ends[1]:
        return RoundComparison(None)
    position = min(length for length, _ in ends)
    row = min(max(0, position - record.start_length), len(round_.read_token_ids))
    recorded_end, own_end = (
        f"token {token} after {length - prompt_length} tokens" for length, token in ends
    )
    found = Discrepancy(
        DiscrepancyKind.TOKEN, position - prompt_length, recorded_end, own_end, round_.index
    )
    return RoundComparison(found, (), row, ends[0][1])


def _differs(then: Decision, now: Decision, draft: int) -> DiscrepancyKind | None:
    """Return how two decisions on a draft differ; None if only their numbers may.

    Matches have no numbers in a recording.
    """
    reached = Outcome.NOT_REACHED not in (then.outcome, now.outcome)
    if then.outcome is now.outcome and (not reached or then.outcome is Outcome.EXACT):
        return None
    if reached and _own_token(then, draft) != _own_token(now, draft):
        return DiscrepancyKind.TOKEN
    if then.outcome is not now.outcome:
        return DiscrepancyKind.DECISION
    told = [(getattr(then, n) is None) != (getattr(now, n) is None) for n in _NUMBERS]
    return DiscrepancyKind.DECISION if any(told) else None


def _own_token(decision: Decision, draft: int) -> int:
    own = decision.target_token_id
    return draft if decision.outcome is Outcome.EXACT or own is None else own


def _told(decision: Decision) -> str:
    """Return a decision in words."""
    parts = [decision.outcome.name]
    if decision.target_token_id is not None and decision.outcome is not Outcome.EXACT:
        parts.append(f"target's token {decision.target_token_id}")
    numbers = ((name, getattr(decision, name)) for name in _NUMBERS)
    return ", ".join([*parts, *(f"{name} {n:.6g}" for name, n in numbers if n is not None)])


def within_rounding(
    rows: Tensor,
    read_token_ids: Sequence[int],
    first: RoundComparison,
    tolerance: float,
    rejudge: Callable[[Tensor], RoundComparison],
) -> tuple[RoundComparison, set[int]]:
    """Return the comparison after near-ties have gone the recorded way, and the rows changed.

    `rows` are a round's raw logits [K + 1, V], `first` its comparison as they are, `tolerance` the
    share of a row's largest logit.
    """
    found, ties, rows = first, set[int](), rows.clone()
    while found.discrepancy is not None and tolerance:
        row = found.row
        read = read_token_ids[row] if row < len(read_token_ids) else None
        nats = tolerance * float(rows[row].abs().max())
        for changed in _nearby(rows[row], read, found.recorded_token_id, nats):
            attempt = rows.clone()
            attempt[row] = changed
            again = rejudge(attempt)
            if again.discrepancy is None or again.row > row:
                rows, found = attempt, again
                ties.add(row)
                break
        else:
            return found, ties
    return found, ties


def _nearby(row: Tensor, read: int | None, own: int | None, nats: float) -> Iterator[Tensor]:
    """Yield changed rows: two logits moved towards each other, or all drawn together or apart."""
    for token_id, amount in ((own, 2 * nats), (read, 2 * nats), (read, -2 * nats)):
        if token_id is not None:
            changed = row.clone()
            changed[token_id] += amount
            yield changed
    top = row.float().topk(3).values
    spread = max(float(top[0] - top[2]), nats)
    for factor in (1 + nats / spread, 1 - nats / spread):
        yield (top[0] + (row.float() - top[0]) * factor).to(row.dtype)
