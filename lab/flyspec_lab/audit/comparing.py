"""What differs between a recorded round and the same round judged again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from flyspec.engine.distributions import RoundedDistributions
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
        """Whether they differ by more than the tolerance, a share of the scale or of the number.

        Ratios of probabilities can be far larger than logits.
        """
        if not tolerance:
            return self.difference != 0.0  # NaN too
        scale = max(self.scale, abs(self.own) if math.isfinite(self.own) else 0.0)
        return not self.difference <= tolerance * scale


class Difference(NamedTuple):
    """A decision, or the token after them, that turns out differently; `row` is its row of logits.

    `recorded_token_id` is the token that the recording has as the target's own there, if it says.
    """

    kind: DiscrepancyKind
    row: int
    position: int
    recorded: str
    expected: str
    recorded_token_id: int | None = None


@dataclass(frozen=True)
class RoundComparison:
    """The first difference of a round, and its numbers, up to that difference."""

    difference: Difference | None
    numbers: Sequence[NumberPair]


def compare(
    round_: RetoldRound,
    verdict: Verdict | Exception,
    prompt_length: int,
    scales: Sequence[float],
) -> RoundComparison:
    """Compare a recorded round with its new verdict. Raises what the model failed with.

    `scales` has the largest raw logit of each row.
    """
    if isinstance(verdict, InvalidArgumentError):
        start = round_.record.start_length
        wrong = Difference(
            DiscrepancyKind.RECORD, 0, start, str(verdict), "a round that can be judged"
        )
        return RoundComparison(wrong, ())
    if isinstance(verdict, Exception):
        raise verdict
    if round_.record.draft_token_ids:
        difference = _first_difference(round_, verdict)
    else:
        difference = _first_plain_difference(round_, verdict)
    first = round_.record.start_length - prompt_length
    decided = round_.record.decisions[: difference.row if difference else None]
    numbers = [
        NumberPair(first + index, name, recorded, own, scales[index])
        for index, (then, now) in enumerate(zip(decided, verdict.decisions, strict=False))
        for name in _NUMBERS
        if (recorded := getattr(then, name)) is not None and (own := getattr(now, name)) is not None
    ]
    return RoundComparison(difference, numbers)


def first_misdrawn(round_: RetoldRound, seed: int, drawn_from: bool) -> Difference | None:
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
            return Difference(
                DiscrepancyKind.RECORD,
                index,
                position,
                f"draft {draft}",
                f"{drawn}, by its distribution",
            )
    return None


def _first_difference(round_: RetoldRound, verdict: Verdict) -> Difference | None:
    record, start = round_.record, round_.record.start_length
    for index, (then, now) in enumerate(zip(record.decisions, verdict.decisions, strict=True)):
        kind = _differs(then, now, record.draft_token_ids[index])
        if kind is not None:
            own = then.target_token_id
            if then.outcome is Outcome.EXACT:
                own = record.draft_token_ids[index]
            return Difference(kind, index, start + index, _told(then), _told(now), own)
    if (record.keep_length, record.next_token_id) == (verdict.keep_length, verdict.next_token_id):
        return None
    position = min(record.keep_length, verdict.keep_length)
    return Difference(
        DiscrepancyKind.TOKEN,
        min(max(0, position - start), len(record.draft_token_ids)),
        position,
        f"token {record.next_token_id} after {record.keep_length} tokens",
        f"token {verdict.next_token_id} after {verdict.keep_length} tokens",
        record.next_token_id,
    )


def _first_plain_difference(round_: RetoldRound, verdict: Verdict) -> Difference | None:
    """Compare plain tokens, judged as if they were drafts: each must be the target's own."""
    own = verdict.keep_length - verdict.start_length
    recorded = [*round_.record.plain_token_ids, round_.record.next_token_id]
    # A verdict ends at its first EOS, which nothing follows.
    token = recorded[own] if own < len(recorded) else None
    if token == verdict.next_token_id:
        return None
    return Difference(
        DiscrepancyKind.TOKEN,
        own,
        verdict.keep_length,
        f"token {token}",
        f"token {verdict.next_token_id}",
        token,
    )


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


def discrepancy_of(pair: NumberPair, token_text: str) -> Discrepancy:
    return Discrepancy(
        DiscrepancyKind.NUMBER,
        pair.token_index,
        f"{pair.name} {pair.recorded:.8g}",
        f"{pair.own:.8g}",
        token_text=token_text,
    )
