"""What of a round the state machines accept and count; `test_rounds_machine` has the rest."""

from __future__ import annotations

import pytest

from flyspec.errors import FlyspecError
from flyspec.values.rounds import (
    Decision,
    DraftChunk,
    DraftTimings,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin, TokenLogprobs
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.window import Checked, Token, WindowState, step

EXACT, LOOSE = Decision(Outcome.EXACT), Token(7, Origin.LOOSE, 0.5)


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


MODEL, LOOSE = Origin.EXACT_MODEL, Origin.LOOSE
OUTCOMES = {
    "e": Decision(Outcome.EXACT),
    "l": Decision(Outcome.LOOSE, 90, None, 0.25),
    "p": Decision(Outcome.PROVISIONAL, 91, None, 0.5),
    "r": Decision(Outcome.REJECTED, 92, None, 4.0),
    "n": Decision(Outcome.NOT_REACHED),
}


def checked(outcomes, keep_length, next_token, open_window=None, logprobs=()):
    """Drafts 10, 11, ... with these outcomes."""
    drafts = list(range(10, 10 + len(outcomes)))
    verdict = Verdict(
        keep_length,
        next_token,
        tuple(OUTCOMES[o] for o in outcomes),
        open_window,
        logprobs=logprobs,
    )
    return Checked(verdict, drafts, [MODEL] * len(drafts))


def state(length=5, limit=50, **changes):
    return WindowState(length, limit, **changes)


def opened(eager=False, limit=50):
    """A window of two matches at position 6, opened by a round of three drafts at length 5."""
    window = OpenWindow(6, 91, 1, 0.5, TokenLogprobs(-1.0))
    before, commands = step(state(eager=eager, limit=limit), checked("epe", 8, 70, window))
    return window, before, commands


@pytest.mark.parametrize(
    "event",
    [
        checked("ee", 8, 60),  # more than was drafted
        checked("ee", 4, 60),  # a rollback without a window
        checked("ee", 7, 60, OpenWindow(4, 1, 1, 0.0)),  # a window before the round
        checked("ee", 7, 60, OpenWindow(7, 1, 1, 0.0)),  # a window at the bonus
        checked("ee", 7, 60, None, [TokenLogprobs(-1.0)]),
        Checked(checked("e", 6, 60).verdict, [10, 11], [MODEL] * 2),
    ],
)
def test_verdicts_that_no_rule_gives_are_refused(event):
    with pytest.raises(FlyspecError, match="verify service"):
        step(state(), event)


def test_a_window_cannot_move_or_fail_elsewhere():
    _, before, _ = opened()
    for event in (
        checked("e", 10, 60, OpenWindow(7, 1, 1, 0.0)),
        checked("e", 7, 60),
        checked("e", 6, 60, OpenWindow(6, 1, 1, 0.0)),
    ):
        with pytest.raises(FlyspecError, match="verify service"):
            step(before, event)
