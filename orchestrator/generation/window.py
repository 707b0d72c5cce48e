"""The window machine: which tokens are final and which are held back. Pure: no I/O, no clocks.

`step` takes the state and what happened, and gives the next state with what to do about it. One
window at most is open (DESIGN, section 4): its token and all that follow are held back until it
closes. If it fails, the sequence is cut back to the window's position and the target's own token
takes the place there. A rollback is a length.

    positions   0 ......... committed | held back ............ | the round being checked
    client sees [0, committed)        | nothing; eager: shown  |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flyspec.errors import FlyspecError
from flyspec.values.rounds import OpenWindow, Outcome, Verdict
from flyspec.values.tokens import Origin, TokenLogprobs


class Token(NamedTuple):
    """A token of the output; of one held back, `origin` is what it will be once it is final.

    `gap_nats` is set for LOOSE tokens, `logprobs` if they were asked for.
    """

    token_id: int
    origin: Origin
    gap_nats: float | None = None
    logprobs: TokenLogprobs | None = None


class WindowState(NamedTuple):
    """A sequence of `length` tokens, prompt included, of which the last, `held`, are not final.

    `limit` is the length at which the output is complete: a window still open then has failed.
    With `eager`, held tokens are shown. `window` is open if and only if tokens are held.
    """

    length: int
    limit: int
    eager: bool = False
    held: tuple[Token, ...] = ()
    window: OpenWindow | None = None

    @property
    def committed_length(self) -> int:
        """Tokens that are final, prompt included."""
        return self.length - len(self.held)


# --- events ---------------------------------------------------------------------------------


class Checked(NamedTuple):
    """The target's verdict on drafts that followed the whole sequence; none in plain decoding."""

    verdict: Verdict
    draft_token_ids: Sequence[int] = ()
    draft_origins: Sequence[Origin] = ()


class NothingDrafted(NamedTuple):
    """The drafter has no proposal: an open window cannot be continued, so it fails."""


Event = Checked | NothingDrafted


# --- commands, to be carried out in order ---------------------------------------------------


class Extend(NamedTuple):
    """Append tokens to the sequence; the verify service holds them already."""

    token_ids: list[int]


class RollBack(NamedTuple):
    """Keep `length` tokens of the sequence, then append `token_id`.

    The token that was at `length` had cost `gap_nats`.
    """

    length: int
    token_id: int
    gap_nats: float


class Commit(NamedTuple):
    """These tokens are final; with eager, some of the first may have been shown."""

    tokens: Sequence[Token]


class Show(NamedTuple):
    """These tokens follow what was committed or shown, and are provisional; eager only."""

    tokens: Sequence[Token]


class Hide(NamedTuple):
    """Nothing that was shown and not committed stands, if anything was; eager only."""


Command = Extend | RollBack | Commit | Show | Hide


# --- transitions ----------------------------------------------------------------------------


def step(state: WindowState, event: Event) -> tuple[WindowState, list[Command]]:
    """The state after `event`, and what to do in order.

    Raises `FlyspecError` for a verdict that no rule can give.
    """
    if isinstance(event, Checked):
        return _checked(state, event)
    if state.window is None:
        return state, []
    return _fail(state, state.window)


def _checked(state: WindowState, event: Checked) -> tuple[WindowState, list[Command]]:
    """Take over a verdict: what is new, what of all that is held back becomes final."""
    verdict, window = event.verdict, state.window
    num_accepted = verdict.keep_length - state.length
    if num_accepted < 0:
        if window is None or window.position != verdict.keep_length or verdict.open_window:
            raise _impossible(state, verdict)
        logprobs = verdict.logprobs[0] if verdict.logprobs else window.target_logprobs
        failed = window._replace(target_token_id=verdict.next_token_id, target_logprobs=logprobs)
        return _fail(state, failed)
    num_accepted -= len(verdict.plain_token_ids)
    if not 0 <= num_accepted <= len(event.draft_token_ids):
        raise _impossible(state, verdict)
    tokens = _tokens(event, num_accepted)
    commands: list[Command] = [Extend([token.token_id for token in tokens])]
    if window is None and verdict.open_window is None:
        commands.append(Commit(tokens))
        return state._replace(length=verdict.keep_length + 1), commands
    return _hold(state, verdict, tokens, commands)


def _hold(
    state: WindowState, verdict: Verdict, tokens: list[Token], commands: list[Command]
) -> tuple[WindowState, list[Command]]:
    """Commit what comes before the window that is open now, hold back the rest."""
    window = verdict.open_window
    committed, length = state.committed_length, verdict.keep_length + 1
    start = length if window is None else window.position
    # A window is one that was open before, or its token is a draft of this round.
    if window is not None and not (
        window.position == committed < state.length
        or state.length <= window.position < verdict.keep_length
    ):
        raise _impossible(state, verdict)
    everything = (*state.held, *tokens)
    held = everything[start - committed :]
    if start > committed:
        commands.append(Commit(everything[: start - committed]))
    # Nothing can be drafted after the limit. With the window beyond it, the output is complete.
    failed = window is not None and window.position < state.limit <= length
    if held and state.eager and not failed:
        commands.append(Show(held[max(0, state.length - start) :]))
    state = state._replace(length=length, held=held, window=window)
    if window is not None and failed:
        state, failing = _fail(state, window)
        commands += failing
    return state, commands


def _fail(state: WindowState, window: OpenWindow) -> tuple[WindowState, list[Command]]:
    """Go back to the window's position; the target's own token there is final."""
    token = Token(window.target_token_id, Origin.CORRECTION, None, window.target_logprobs)
    commands: list[Command] = [RollBack(window.position, token.token_id, window.gap_nats)]
    if state.eager:
        commands.append(Hide())
    commands.append(Commit((token,)))
    return state._replace(length=window.position + 1, held=(), window=None), commands


def _tokens(event: Checked, num_accepted: int) -> list[Token]:
    """The accepted drafts and the token that follows them."""
    verdict = event.verdict
    decisions = verdict.decisions
    if len(decisions) != len(event.draft_token_ids):
        raise FlyspecError(
            f"verify service: {len(decisions)} decisions on {len(event.draft_token_ids)} drafts"
        )
    if verdict.plain_token_ids:
        drawn = [*verdict.plain_token_ids, verdict.next_token_id]
        return [Token(token_id, Origin.PLAIN) for token_id in drawn]
    logprobs: Sequence[TokenLogprobs | None] = verdict.logprobs or [None] * (num_accepted + 1)
    if len(logprobs) != num_accepted + 1:
        raise FlyspecError(
            f"verify service: {len(logprobs)} logprobs for {num_accepted + 1} tokens"
        )
    tokens = []
    for index in range(num_accepted):
        decision = decisions[index]
        if decision.outcome is Outcome.EXACT:
            origin, gap = event.draft_origins[index], None
        else:
            origin, gap = Origin.LOOSE, decision.gap_nats or 0.0
        tokens.append(Token(event.draft_token_ids[index], origin, gap, logprobs[index]))
    if not decisions:
        last = Origin.PLAIN
    elif any(d.outcome is Outcome.REJECTED for d in decisions):
        last = Origin.CORRECTION
    else:
        last = Origin.BONUS
    tokens.append(Token(verdict.next_token_id, last, None, logprobs[-1]))
    return tokens


def _impossible(state: WindowState, verdict: Verdict) -> FlyspecError:
    """A verdict that does not fit the sequence it was given."""
    return FlyspecError(
        f"verify service: keep_length {verdict.keep_length} with open window "
        f"{verdict.open_window} on {state.length} tokens, {state.committed_length} of them final"
    )
