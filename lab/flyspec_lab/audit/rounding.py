"""Whether a verdict follows from some logits within the tolerance of the target's.

Where numerics differ, a near-tie may have gone the other way: between two tokens, or between a
number and its threshold. Then a row of logits, changed by no more than the tolerance, gives the
recorded decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from flyspec_lab.audit.comparing import Difference, RoundComparison

Rejudge = Callable[[Tensor], RoundComparison]


def within_rounding(
    rows: Tensor,
    read_token_ids: Sequence[int],
    first: RoundComparison,
    tolerance: float,
    rejudge: Rejudge,
) -> tuple[RoundComparison, set[int]]:
    """Return the comparison after near-ties have gone the recorded way, and the rows changed.

    `rows` are a round's raw logits [K + 1, V], `first` its comparison as they are, `tolerance` the
    share of a row's largest logit.
    """
    found, ties, rows = first, set[int](), rows.clone()
    while found.difference is not None and tolerance:
        row = found.difference.row
        read = read_token_ids[row] if row < len(read_token_ids) else None
        nats = tolerance * float(rows[row].abs().max())
        for changed in _nearby(rows[row], read, found.difference, nats):
            attempt = rows.clone()
            attempt[row] = changed
            again = rejudge(attempt)
            if again.difference is None or again.difference.row > row:
                rows, found = attempt, again
                ties.add(row)
                break
        else:
            return found, ties
    return found, ties


def _nearby(row: Tensor, read: int | None, difference: Difference, nats: float) -> Iterator[Tensor]:
    """Yield changed rows: two logits moved towards each other, or all drawn together or apart."""
    raised = difference.recorded_token_id
    if raised is not None:
        yield _moved(row, raised, 2 * nats)
    if read is not None:
        for amount in (2 * nats, -2 * nats):
            yield _moved(row, read, amount)
    top = row.float().topk(3).values
    spread = max(float(top[0] - top[2]), nats)
    for factor in (1 + nats / spread, 1 - nats / spread):
        yield (top[0] + (row.float() - top[0]) * factor).to(row.dtype)


def _moved(row: Tensor, token_id: int, amount: float) -> Tensor:
    changed = row.clone()
    changed[token_id] += amount
    return changed
