"""The window state machine: which tokens are final and which are held back. No I/O, no clock.

`step` maps a state and an event to the next state and a list of commands. At most one window is
open (DESIGN, section 4): its token and all that follow are held back until it closes. If it fails,
the sequence is cut back to the window's position and continues there with the target's own token.

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
    """An output token. If it is held back, `origin` is its origin once it becomes final.

    `gap_nats` is set for LOOSE tokens, `logprobs` if requested.
    """

    token_id: int
    origin: Origin
    gap_nats: float | None = None
    logprobs: TokenLogprobs | None = None


class WindowState(NamedTuple):
    """A sequence of `length` tokens including the prompt; the last ones, `held`, are not final.

    `limit` is the length at which the output is complete; a window still open then has failed.
    With `eager`, held tokens are shown. `window` is set if and only if tokens are held.
    """

    length: int
    limit: int
    eager: bool = False
    held: tuple[Token, ...] = ()
    window: OpenWindow | None = None

    @property
    def committed_length(self) -> int:
        """Number of final tokens, including the prompt."""
        return self.length - len(self.held)


# --- events ---------------------------------------------------------------------------------


class Checked(NamedTuple):
    """The target's verdict on drafts following the sequence (no drafts in plain decoding)."""

    verdict: Verdict
    draft_token_ids: Sequence[int] = ()
    draft_origins: Sequence[Origin] = ()


class NothingDrafted(NamedTuple):
    """The drafter has no proposal, so an open window cannot continue and fails."""


Event = Checked | NothingDrafted


# --- commands, to be executed in order ------------------------------------------------------


class Extend(NamedTuple):
    """Append tokens to the sequence; the verify service already has them."""

    token_ids: list[int]


class RollBack(NamedTuple):
    """Keep `length` tokens of the sequence, then append `token_id`.

    `gap_nats` is the cost of the token it replaces.
    """

    length: int
    token_id: int
    gap_nats: float


class Commit(NamedTuple):
    """Make tokens final; if eager, leading ones may already have been shown."""

    tokens: Sequence[Token]


class Show(NamedTuple):
    """Show provisional tokens, after those committed or shown; eager only."""

    tokens: Sequence[Token]


class Hide(NamedTuple):
    """Withdraw all tokens that were shown but not committed, if any; eager only."""


Command = Extend | RollBack | Commit | Show | Hide


# --- transitions ----------------------------------------------------------------------------


def step(state: WindowState, event: Event) -> tuple[WindowState, list[Command]]:
    """Return the state after `event` and the commands to execute in order.

    Raises `FlyspecError` for a verdict that no rule can produce.
    """
    if isinstance(event, Checked):
        return _checked(state, event)
    if state.window is None:
        return state, []
    return _fail(state, state.window)


def _checked(state: WindowState, event: Checked) -> tuple[WindowState, list[Command]]:
    """Apply a verdict: extend the sequence, and commit held tokens that become final."""
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
    """Commit the tokens before the open window, and hold back the rest."""
    window = verdict.open_window
    committed, length = state.committed_length, verdict.keep_length + 1
    start = length if window is None else window.position
    # The window was already open, or its token is a draft of this round.
    if window is not None and not (
        window.position == committed < state.length
        or state.length <= window.position < verdict.keep_length
    ):
        raise _impossible(state, verdict)
    everything = (*state.held, *tokens)
    held = everything[start - committed :]
    if start > committed:
        commands.append(Commit(everything[: start - committed]))
    # Nothing is drafted after the limit; if the window is beyond it, the output is complete.
    failed = window is not None and window.position < state.limit <= length
    if held and state.eager and not failed:
        commands.append(Show(held[max(0, state.length - start) :]))
    state = state._replace(length=length, held=held, window=window)
    if window is not None and failed:
        state, failing = _fail(state, window)
        commands += failing
    return state, commands


def _fail(state: WindowState, window: OpenWindow) -> tuple[WindowState, list[Command]]:
    """Roll back to the window's position, and commit the target's own token there."""
    token = Token(window.target_token_id, Origin.CORRECTION, None, window.target_logprobs)
    commands: list[Command] = [RollBack(window.position, token.token_id, window.gap_nats)]
    if state.eager:
        commands.append(Hide())
    commands.append(Commit((token,)))
    return state._replace(length=window.position + 1, held=(), window=None), commands


def _tokens(event: Checked, num_accepted: int) -> list[Token]:
    """Return the accepted drafts and the token that follows them."""
    verdict = event.verdict
    decisions = verdict.decisions
    if len(decisions) != len(event.draft_token_ids):
        raise FlyspecError(
            f"verify service: {len(decisions)} decisions for {len(event.draft_token_ids)} drafts"
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
    return FlyspecError(
        f"verify service: invalid keep_length {verdict.keep_length} with open window "
        f"{verdict.open_window} for {state.length} tokens, {state.committed_length} of them final"
    )
