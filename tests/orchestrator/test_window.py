"""The window machine's transitions, one by one."""

from __future__ import annotations

import pytest

from flyspec.errors import FlyspecError
from flyspec.values.rounds import Decision, OpenWindow, Outcome, Verdict
from flyspec.values.tokens import Origin, TokenLogprobs
from orchestrator.generation.window import (
    Checked,
    Commit,
    Extend,
    Hide,
    NothingDrafted,
    RollBack,
    Show,
    Token,
    WindowState,
    step,
)

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


def test_without_windows_everything_is_final():
    after, commands = step(state(), checked("elr", 7, 92))
    tokens = [Token(10, MODEL), Token(11, LOOSE, 0.25), Token(92, Origin.CORRECTION)]
    assert commands == [Extend([10, 11, 92]), Commit(tokens)]
    assert (after.length, after.committed_length, after.window) == (8, 8, None)
    _, (_, commit) = step(state(), checked("ee", 7, 60))
    assert commit.tokens[-1] == Token(60, Origin.BONUS)
    _, (_, commit) = step(state(), checked("", 5, 60))
    assert commit.tokens == [Token(60, Origin.PLAIN)]


def test_a_window_holds_back_its_token_and_what_follows():
    window, after, commands = opened()
    assert commands == [Extend([10, 11, 12, 70]), Commit((Token(10, MODEL),))]
    assert after.window == window
    assert (after.length, after.committed_length) == (9, 6)
    assert after.held == (Token(11, LOOSE, 0.5), Token(12, MODEL), Token(70, Origin.BONUS))


def test_a_window_that_closes_makes_all_of_it_final():
    _, before, _ = opened()
    after, commands = step(before, checked("er", 10, 92))
    tokens = (*before.held, Token(10, MODEL), Token(92, Origin.CORRECTION))
    assert commands == [Extend([10, 92]), Commit(tokens)]
    assert (after.length, after.committed_length, after.held) == (11, 11, ())


def test_a_window_may_stay_open_over_rounds():
    window, before, _ = opened()
    window = window._replace(remaining_matches=1)
    after, commands = step(before, checked("e", 10, 71, window))
    assert commands == [Extend([10, 71])]
    assert (after.length, after.committed_length) == (11, 6)


def test_a_window_may_follow_another_in_the_same_round():
    _, before, _ = opened(eager=True)
    second = OpenWindow(10, 91, 3, 0.5)
    after, commands = step(before, checked("epe", 12, 72, second))
    assert commands == [
        Extend([10, 11, 12, 72]),
        Commit((*before.held, Token(10, MODEL))),
        Show((Token(11, LOOSE, 0.5), Token(12, MODEL), Token(72, Origin.BONUS))),
    ]
    assert (after.window, after.committed_length) == (second, 10)


def test_a_failed_window_goes_back_to_its_position():
    window, before, _ = opened()
    after, commands = step(before, checked("er", 6, 91))
    own = Token(91, Origin.CORRECTION, None, window.target_logprobs)
    assert commands == [RollBack(6, 91, 0.5), Commit((own,))]
    assert (after.length, after.committed_length, after.window) == (7, 7, None)


def test_a_window_without_further_drafts_has_failed():
    window, before, _ = opened()
    own = Token(91, Origin.CORRECTION, None, window.target_logprobs)
    after, commands = step(before, NothingDrafted())
    assert commands == [RollBack(6, 91, 0.5), Commit((own,))]
    assert step(after, NothingDrafted()) == (after, [])


def test_a_window_still_open_at_the_limit_has_failed():
    _, after, commands = opened(limit=9, eager=True)
    own = Token(91, Origin.CORRECTION, None, TokenLogprobs(-1.0))
    assert commands == [
        Extend([10, 11, 12, 70]),
        Commit((Token(10, MODEL),)),
        RollBack(6, 91, 0.5),
        Hide(),
        Commit((own,)),
    ]
    assert (after.length, after.window) == (7, None)
    # Before its position the output is complete already: nothing depends on it.
    _, after, commands = opened(limit=6)
    assert commands == [Extend([10, 11, 12, 70]), Commit((Token(10, MODEL),))]


def test_eager_shows_what_is_held_and_retracts_it():
    window, before, commands = opened(eager=True)
    assert commands[-1] == Show(before.held)
    after, commands = step(before, checked("e", 10, 71, window))
    assert commands == [
        Extend([10, 71]),
        Show((Token(10, MODEL), Token(71, Origin.BONUS))),
    ]
    _, commands = step(after, checked("r", 6, 91))
    assert [type(c) for c in commands] == [RollBack, Hide, Commit]


def test_logprobs_go_with_their_tokens():
    told = [TokenLogprobs(-float(i), (i,), (-float(i),)) for i in range(3)]
    _, (_, commit) = step(state(), checked("ler", 7, 92, None, told))
    assert [t.logprobs for t in commit.tokens] == told
    window, before, _ = opened()
    _, (_, commit) = step(before, checked("r", 6, 91, None, told[:1]))
    assert commit.tokens[0].logprobs == told[0]
    assert window.target_logprobs is not None


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
