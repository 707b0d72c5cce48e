"""Budgets, acceptance and loss, round by round."""

from __future__ import annotations

import pytest

from flyspec.values.rounds import (
    Budget,
    Decision,
    DraftChunk,
    DraftTimings,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.window import RollBack, Token
from tests.orchestrator.fakes import Fakes, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import World

EXACT, LOOSE = Decision(Outcome.EXACT), Token(7, Origin.LOOSE, 0.5)
WINDOW = OpenWindow(10, 3, 2, 0.75)


def round_of(decisions, start, keep_length, committed_length, commands=()):
    verdict = Verdict(keep_length, 5, tuple(decisions), start_length=start, round_id=1)
    return RoundOutcome(commands, verdict, start, committed_length, 0)


def test_an_open_window_has_its_share_of_the_budget():
    ledger = Ledger(Budget(3, 2.0))
    assert ledger.budget(None) == Budget(3, 2.0)
    assert ledger.budget(WINDOW) == Budget(2, 1.25)
    ledger.record(round_of([Decision(Outcome.LOOSE, 3, None, 0.5)], 8, 9, 10), [LOOSE])
    assert ledger.budget(WINDOW) == Budget(1, 0.75)
    assert ledger.budget(None) == Budget(2, 1.5)  # as after a rollback
    ledger.record(round_of([EXACT], 10, 11, 12), [LOOSE, LOOSE])
    assert ledger.budget(WINDOW) == Budget(0, 0.0)
    assert Ledger().budget(WINDOW) == Budget(None, None)


def test_accepted_drafts_count_once_no_window_can_drop_them():
    ledger = Ledger()
    provisional = Decision(Outcome.PROVISIONAL, 3, None, 0.75)
    ledger.record(round_of([EXACT, EXACT, provisional, EXACT], 8, 12, 10), [])
    assert ledger.metrics.acceptance_histogram == []
    ledger.record(round_of([EXACT], 13, 14, 10), [])
    rejected = Decision(Outcome.REJECTED, 3, None, 4.0)
    rolled_back = round_of([EXACT, rejected], 15, 10, 11, [RollBack(10, 3, 0.75)])
    ledger.record(rolled_back, [])
    assert ledger.metrics.acceptance_histogram == [2, 0, 1]
    assert ledger.metrics.num_accepted_draft_tokens == 2
    assert (ledger.metrics.num_spec_steps, ledger.metrics.num_draft_tokens) == (3, 7)
    assert (ledger.metrics.num_rollbacks, ledger.metrics.num_rejected_tokens) == (1, 2)
    assert ledger.metrics.rejected_cost_nats == pytest.approx(4.75)


def test_the_end_of_the_output_leaves_an_open_window_behind():
    ledger = Ledger()
    provisional = Decision(Outcome.PROVISIONAL, 3, None, 0.75)
    ledger.record(round_of([EXACT, EXACT, provisional, EXACT], 8, 12, 10), [])
    ledger.finish()
    assert ledger.metrics.acceptance_histogram == [0, 0, 1]
    assert ledger.metrics.num_rejected_tokens == 0


def test_a_window_that_fails_without_a_round_is_no_round():
    ledger = Ledger()
    drafted = DraftChunk(timings=DraftTimings(model_ns=30))
    ledger.record(RoundOutcome([RollBack(10, 3, 0.75)], None, 15, 11, 0, proposal=drafted), [LOOSE])
    assert (
        ledger.metrics.num_rounds,
        ledger.metrics.num_spec_steps,
        ledger.metrics.num_rollbacks,
    ) == (0, 0, 1)
    assert (ledger.metrics.num_loose_tokens, ledger.timings.draft_model_ns) == (1, 30)


def test_times_in_the_target_and_of_judging_are_sums():
    ledger = Ledger()
    for decisions, times in (([EXACT], VerifyTimings(1, 20, 4, 30)), ([], VerifyTimings(9, 2, 1))):
        verdict = Verdict(9, 5, tuple(decisions), start_length=8, timings=times)
        ledger.record(RoundOutcome((), verdict, 8, 9, 0), [])
    assert (ledger.timings.target_model_ns, ledger.timings.judge_ns) == (22, 5)


def test_the_first_round_and_the_proposal_made_beside_it_are_the_opening():
    ledger = Ledger(arrived_ns=100)
    ledger.followed(DraftChunk(timings=DraftTimings(model_ns=30)))
    for began_ns, forward_ns, drafted_ns in ((150, 20, 0), (400, 7, 9)):
        verdict = Verdict(9, 5, (), start_length=8, timings=VerifyTimings(forward_ns=forward_ns))
        proposal = DraftChunk(timings=DraftTimings(model_ns=drafted_ns))
        round_ = RoundOutcome((), verdict, 8, 9, 250, proposal=proposal, began_ns=began_ns)
        ledger.record(round_, [])
    times = ledger.timings
    assert (times.opening_ns, times.opening_target_model_ns, times.target_model_ns) == (300, 20, 27)
    assert (times.opening_draft_model_ns, times.draft_model_ns) == (30, 39)


def test_rejections_of_tokens_that_match_are_no_mismatches():
    ledger = Ledger()
    ledger.record(round_of([Decision(Outcome.REJECTED, 3)], 8, 8, 9), [])
    assert ledger.metrics.num_rejected_tokens == 0


class TwoMismatches(World):
    """All agree except two drafts that the rule would accept: positions 5 and 11."""

    def own(self, prefix):
        return 3

    def guess(self, prefix):
        return 4 if len(prefix) in (5, 11) else 3

    def passes(self, prefix, token):
        return True


@pytest.mark.parametrize(("budget", "loose"), [(None, [5, 11]), (1, [5]), (2, [5, 11])])
async def test_a_window_that_closes_has_spent_its_share_in_the_same_round(budget, loose):
    """Rounds from 4, 8 and 13 on: the second closes the first window, then meets a mismatch."""
    plan = plan_of(max_loose_tokens=budget, max_tokens=30)
    fakes = Fakes(TwoMismatches(), plan, TOKENIZER, window_size=3)
    rounds, final = {}, []
    async for round_, update in fakes.run():
        rounds[round_.start] = round_.request
        final += update.final
    assert [3 + i for i, t in enumerate(final) if t.origin is Origin.LOOSE] == loose
    assert rounds[8].budget.loose_tokens == (None if budget is None else budget - 1)
