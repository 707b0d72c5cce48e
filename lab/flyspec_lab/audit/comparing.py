"""Differences between a recorded round and the same round judged again, and what explains them.

Where numerics differ, a near-tie may have gone the other way: between two tokens, or between a
number and its threshold. Then a row of logits, changed by no more than the tolerance, gives the
recorded decision.

Whether numbers differ by more than rounding is measured where they are rounded to half precision,
in which rounding is as large as what quantisation changes: by how far this machine's own numbers
are from those of the same weights in float32. Numbers of the same weights from elsewhere are as far
off on average; those of other weights are farther.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyspec.engine.distributions import RoundedDistributions
from flyspec.errors import InvalidArgumentError
from flyspec.values.rounds import Decision, Outcome, Verdict
from flyspec_lab.audit.report import Discrepancy, DiscrepancyKind
from flyspec_lab.audit.retelling import RetoldRound

TOLERANCE = {"float64": 2.0**-40, "float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""By how much numbers may differ between machines, kernels and batches, by data type of the
weights, as a share of the position's largest raw logit: some units of rounding. In bfloat16 a unit
is 2^-8 of it, which is 0.5 nats at a logit of 128."""
FEWEST_NUMBERS = 16
"""Below this no sample of differences is significant enough."""
SIGNIFICANT = 1e-4
"""Chance of calling the same weights others, for one recording."""
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
    first = round_.record.start_length - prompt_length
    if isinstance(verdict, InvalidArgumentError):
        return RoundComparison(
            Discrepancy(
                DiscrepancyKind.RECORD, first, str(verdict), "a round that can be judged",
                round_.index,
            )
        )  # fmt: skip
    if isinstance(verdict, Exception):
        raise verdict
    drafted = bool(round_.record.draft_token_ids)
    found = (_compare_drafts if drafted else _compare_plain)(round_, verdict, prompt_length)
    decided = round_.record.decisions[: found.row if found.discrepancy else None]
    numbers = [
        NumberPair(first + index, name, recorded, own, scales[index])
        for index, (then, now) in enumerate(zip(decided, verdict.decisions, strict=False))
        for name in _NUMBERS
        if (recorded := getattr(then, name)) is not None and (own := getattr(now, name)) is not None
    ]
    return found._replace(numbers=numbers)


def _compare_drafts(round_: RetoldRound, verdict: Verdict, prompt_length: int) -> RoundComparison:
    record, first = round_.record, round_.record.start_length - prompt_length
    for row, (then, now) in enumerate(zip(record.decisions, verdict.decisions, strict=True)):
        draft = record.draft_token_ids[row]
        kind = _differs(then, now, draft)
        if kind is not None:
            found = Discrepancy(kind, first + row, _told(then), _told(now), round_.index)
            own = draft if then.outcome is Outcome.EXACT else then.target_token_id
            return RoundComparison(found, (), row, own)
    ends = [(each.keep_length, each.next_token_id) for each in (record, verdict)]
    if ends[0] == ends[1]:
        return RoundComparison(None)
    position = min(record.keep_length, verdict.keep_length)
    row = min(max(0, position - record.start_length), len(record.draft_token_ids))
    recorded, expected = (f"token {token} after {length} tokens" for length, token in ends)
    found = Discrepancy(
        DiscrepancyKind.TOKEN, position - prompt_length, recorded, expected, round_.index
    )
    return RoundComparison(found, (), row, record.next_token_id)


def _compare_plain(round_: RetoldRound, verdict: Verdict, prompt_length: int) -> RoundComparison:
    """Compare plain tokens, judged as if they were drafts: each must be the target's own."""
    row = verdict.keep_length - verdict.start_length
    recorded = [*round_.record.plain_token_ids, round_.record.next_token_id]
    # A verdict ends at its first EOS, which nothing follows.
    token = recorded[row] if row < len(recorded) else None
    if token == verdict.next_token_id:
        return RoundComparison(None)
    said = f"token {token}", f"token {verdict.next_token_id}"
    at = verdict.keep_length - prompt_length
    found = Discrepancy(DiscrepancyKind.TOKEN, at, *said, round_.index)
    return RoundComparison(found, (), row, token)


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


def first_misdrawn(
    round_: RetoldRound, prompt_length: int, seed: int, drawn_from: bool
) -> Discrepancy | None:
    """Return the first draft that is not what its recorded distribution draws with the seed.

    Only where drafts are drawn from what is recorded (`drawn_from`), and by noise that is keyed as
    ours. A point mass, as of prompt lookup, has nothing recorded.
    """
    record = round_.record
    for index, told in enumerate(record.draft_distributions if drawn_from else ()):
        if not told.log_probs:
            continue
        half = torch.from_numpy(np.frombuffer(told.log_probs, "<f2").astype(np.float16))[None]
        ids = torch.tensor([told.token_ids]) if told.token_ids else None
        position, draft = record.start_length + index, record.draft_token_ids[index]
        drawn = int(RoundedDistributions(half, ids).draw([position], seed)[0])
        if drawn != draft:
            said = f"draft {draft}", f"{drawn}, by its distribution"
            at = position - prompt_length
            return Discrepancy(DiscrepancyKind.RECORD, at, *said, round_.index)
    return None


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


def chance_of_rounding(
    recorded: Sequence[float], own: Sequence[float], reference: Sequence[float]
) -> float | None:
    """Return the chance that recorded numbers are as far from the reference if they were rounded
    like this machine's own; None for too few numbers.

    One-sided Wilcoxon signed-rank test of |recorded - reference| - |own - reference|.
    """
    from scipy.stats import wilcoxon

    distances = [(abs(a - c), abs(b - c)) for a, b, c in zip(recorded, own, reference, strict=True)]
    differences = [far - near for far, near in distances if far != near]
    if len(differences) < FEWEST_NUMBERS:
        return None
    return float(wilcoxon(differences, alternative="greater").pvalue)


def combined(chances: Sequence[float]) -> float | None:
    """Return the chance for several recordings together (Fisher's method); None without any."""
    from scipy.stats import combine_pvalues

    # 0 is below what a float can say.
    least = [max(chance, 1e-300) for chance in chances]
    return float(combine_pvalues(least, method="fisher").pvalue) if least else None
