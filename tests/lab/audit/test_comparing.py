"""Decisions and numbers compared, and what rounding explains, without a model."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flyspec.values.generation import RoundRecord
from flyspec.values.rounds import Decision, Outcome, Verdict
from flyspec_lab.audit import Auditor
from flyspec_lab.audit.comparing import NumberPair, RoundComparison, compare, within_rounding
from flyspec_lab.audit.report import Discrepancy, DiscrepancyKind
from flyspec_lab.audit.retelling import RetoldRound

EXACT = Decision(Outcome.EXACT)
SCALES = [8.0] * 9


def told(decisions, drafts=(5, 6, 7), keep=10, token=9, **known) -> RetoldRound:
    record = RoundRecord(10, "model", drafts, decisions, keep, token, keep + 1, **known)
    return RetoldRound(0, record, (1,) * 10, drafts, None)


def rejected(token: int, **numbers: float) -> Decision:
    return Decision(Outcome.REJECTED, token, **numbers)


NOT_REACHED = Decision(Outcome.NOT_REACHED)


@pytest.mark.parametrize(
    ("now", "kind", "row"),
    [
        ([EXACT, rejected(9, gap_nats=0.5), NOT_REACHED], None, None),
        ([rejected(3, gap_nats=1.0), NOT_REACHED, NOT_REACHED], DiscrepancyKind.TOKEN, 0),
        ([EXACT, rejected(8, gap_nats=0.5), NOT_REACHED], DiscrepancyKind.TOKEN, 1),
        ([EXACT, Decision(Outcome.EXACT, 6), EXACT], DiscrepancyKind.TOKEN, 1),
        ([EXACT, Decision(Outcome.LOOSE, 9, gap_nats=0.5), EXACT], DiscrepancyKind.DECISION, 1),
        (
            [EXACT, rejected(9, gap_nats=0.5, entropy=0.2), NOT_REACHED],
            DiscrepancyKind.DECISION,
            1,
        ),
    ],
)
def test_the_first_decision_that_differs(now, kind, row) -> None:
    then = told([EXACT, rejected(9, gap_nats=0.5), NOT_REACHED], keep=11)
    keep = 11 if now[1].outcome is Outcome.REJECTED else 10
    verdict = Verdict(keep, 9, tuple(now), start_length=10)
    found = compare(then, verdict, 4, SCALES)
    if kind is None:
        assert found.discrepancy is None
        assert found.numbers == [NumberPair(7, "gap_nats", 0.5, 0.5, 8.0)]
    else:
        assert found.discrepancy is not None
        assert (found.discrepancy.kind, found.row) == (kind, row)
        assert found.discrepancy.token_index == 6 + row


def test_numbers_differ_by_more_than_single_precision_or_the_tolerance() -> None:
    assert not NumberPair(0, "gap", 0.1, float(torch.tensor(0.1))).differs(0.0)
    assert NumberPair(0, "gap", 0.1, 0.1 + 1e-7).differs(0.0)
    assert not NumberPair(0, "gap", 1.0, 1.2, 8.0).differs(2**-5)
    assert NumberPair(0, "gap", 1.0, 1.3, 8.0).differs(2**-5)
    assert not NumberPair(0, "ratio", 1000.0, 1001.0, 8.0).differs(2**-5)
    for tolerance in (0.0, 2**-5):
        assert not NumberPair(0, "ratio", math.inf, math.inf).differs(tolerance)
        assert NumberPair(0, "ratio", math.inf, 1.0).differs(tolerance)
        assert NumberPair(0, "ratio", math.nan, 1.0).differs(tolerance)


def test_rounding_explains_a_near_tie_and_nothing_else() -> None:
    """A stand-in for a verdict: the first row's most likely token must be token 1."""

    def rejudge(rows: torch.Tensor) -> RoundComparison:
        if int(rows[0].argmax()) == 1:
            return RoundComparison(None)
        return RoundComparison(Discrepancy(DiscrepancyKind.TOKEN, 10, "1", "0"), (), 0, 1)

    for behind, explained in ((0.05, True), (3.0, False)):
        rows = torch.tensor([[4.0, 4.0 - behind, 1.0, 0.0]])
        found, ties = within_rounding(rows, [], rejudge(rows), 2**-5, rejudge)
        assert (found.discrepancy is None, ties) == (explained, {0} if explained else set())
        assert float(rows[0, 1]) == pytest.approx(4.0 - behind)  # as it was


def test_the_chance_of_rounding() -> None:
    draw = random.Random(1)

    def chance(own: float, recorded: float, count: int = 100) -> float | None:
        auditor = Auditor(target=None)
        auditor._excesses += (
            abs(draw.gauss(0, recorded)) - abs(draw.gauss(0, own)) for _ in range(count)
        )
        return auditor.chance_of_rounding()

    assert chance(0.01, 0.01) > 0.01
    assert chance(0.01, 0.05) < 1e-6
    assert chance(0.05, 0.01) > 0.99
    assert chance(0.01, 0.05, 9) is None
    assert chance(0.0, 0.0) is None
