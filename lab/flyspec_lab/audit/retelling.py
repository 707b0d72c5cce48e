"""Follows a recording's rounds without a model, and finds where it contradicts itself.

The rounds alone determine tokens, origins and text: the same state machine and detokenizer as in
the orchestrator put them together again. Budgets, windows and the loop guard must be what the
rounds before left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flyspec.errors import FlyspecError
from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import FinishReason, Recording, RoundRecord
from flyspec.values.rounds import Budget, OpenWindow, Outcome, Verdict
from flyspec.values.tokens import Origin
from flyspec_lab.audit.report import Discrepancy, DiscrepancyKind
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.output import Output
from orchestrator.generation.plan import OutputLimits
from orchestrator.generation.window import (
    Checked,
    Commit,
    Event,
    Extend,
    NothingDrafted,
    RollBack,
    Token,
    WindowState,
    step,
)
from verify_service.rules.presets import window_of

_COST_TOLERANCE_NATS = 1e-4
"""Costs are summed from single-precision numbers."""


@dataclass(frozen=True)
class RetoldRound:
    """A round to judge again: its record, and the sequence before it.

    `read_token_ids` are the tokens after the prefix that the target read, drafted or its own.
    """

    index: int
    record: RoundRecord
    prefix: Sequence[int]
    read_token_ids: Sequence[int]
    open_window: OpenWindow | None


def retell(
    recording: Recording, tokenizer: Tokenizer
) -> tuple[list[RetoldRound], Discrepancy | None]:
    """Return the rounds to judge, up to the first contradiction, if there is one."""
    follower = _Follower(recording, tokenizer)
    index: int | None = None
    try:
        for index, record in enumerate(recording.rounds):
            follower.follow(index, record)
        index = None
        follower.check_end()
    except _Contradiction as found:
        at, recorded, expected = found.args
        kind = DiscrepancyKind.RECORD
        return follower.rounds, Discrepancy(kind, at, str(recorded), str(expected), index)
    return follower.rounds, None


class _Contradiction(Exception):
    """Its arguments: an output token, what is recorded there, and what follows instead."""


class _Follower:
    """The state while following the rounds."""

    def __init__(self, recording: Recording, tokenizer: Tokenizer) -> None:
        self._recording, self._tokenizer, started = recording, tokenizer, recording.started
        self._prompt_length = len(started.prompt_token_ids)
        self._sequence = list(started.prompt_token_ids)
        self._state = WindowState(self._prompt_length, self._prompt_length + started.max_tokens)
        self._output, self._text = _output_of(recording, tokenizer), ""
        self._num_final = self._num_loose = 0
        self._loose_cost_nats = 0.0
        self._guard = LoopGuard()
        self.rounds: list[RetoldRound] = []

    def follow(self, index: int, record: RoundRecord) -> None:
        at, window = len(self._sequence) - self._prompt_length, self._state.window
        _same(at, "starts at position", record.start_length, len(self._sequence))
        if self._output.finish_reason is not None:
            raise _Contradiction(at, "another round", "the end of the output")
        event: Event
        if window is not None and not record.draft_token_ids:
            _same(at, "goes back to", (record.keep_length, record.next_token_id), window[:2])
            event = NothingDrafted()
        else:
            self._check_given(record, at)
            verdict = Verdict(
                record.keep_length, record.next_token_id, tuple(record.decisions),
                self._window_after(record), record.start_length,
                plain_token_ids=tuple(record.plain_token_ids),
            )  # fmt: skip
            event = Checked(verdict, record.draft_token_ids, record.draft_origins)
            read = record.draft_token_ids or record.plain_token_ids
            self.rounds.append(RetoldRound(index, record, tuple(self._sequence), read, window))
        try:
            self._state, commands = step(self._state, event)
        except FlyspecError as error:
            said = str(error).removeprefix("verify service: ")
            raise _Contradiction(at, said, "a verdict") from None
        for command in commands:
            if isinstance(command, Extend):
                self._sequence.extend(command.token_ids)
            elif isinstance(command, RollBack):
                del self._sequence[command.length :]
                self._sequence.append(command.token_id)
            elif isinstance(command, Commit):
                for token in command.tokens:
                    self._guard.push(token.token_id)
        update = self._output.apply(commands)
        for token, text in zip(update.tokens, update.texts, strict=True):
            self._compare(token, text)
        _same(at, "final tokens", record.committed_length, self._state.committed_length)

    def _compare(self, token: Token, text: str) -> None:
        """Compare a final token and the text that it completes with the output."""
        output, i = self._recording.output, self._num_final
        own = output.token_ids[i] if i < len(output.token_ids) else None
        if own != token.token_id:
            expected = f"{self._shown(token.token_id)}, by the rounds"
            raise _Contradiction(i, "the end" if own is None else self._shown(own), expected)
        _same(i, "origin", output.origins[i].name, token.origin.name)
        if token.origin is Origin.LOOSE:
            recorded, gap = output.loose_gaps_nats[self._num_loose], token.gap_nats or 0.0
            if not math.isclose(recorded, gap, rel_tol=1e-6, abs_tol=1e-6):
                raise _Contradiction(i, f"gap of {recorded:g} nats", f"{gap:g}")
            self._num_loose += 1
            self._loose_cost_nats += gap
        begin = len(self._text)
        _same(i, "token's text", repr(output.text[begin : begin + len(text)]), repr(text))
        self._text += text
        self._num_final += 1

    def _check_given(self, record: RoundRecord, at: int) -> None:
        """Check what a round was judged with: window, budget, and where judging is exact."""
        started, window = self._recording.started, self._state.window
        recorded = record.open_window
        _same(at, "open window", recorded and recorded[:3], window and window[:3])
        limits = Budget(started.max_loose_tokens, started.max_loose_cost_nats)
        held = (0, 0.0) if window is None else (1, window.gap_nats)
        left = limits.less(self._num_loose + held[0], self._loose_cost_nats + held[1])
        _same(at, "budget of loose tokens", record.budget.loose_tokens, left.loose_tokens)
        costs = [
            math.inf if budget.loose_cost_nats is None else budget.loose_cost_nats
            for budget in (record.budget, left)
        ]
        if not math.isclose(*costs, rel_tol=0.0, abs_tol=_COST_TOLERANCE_NATS):
            raise _Contradiction(at, f"budget of {costs[0]} nats", costs[1])
        exact, own = record.exact_until_position, started.exact_until_position
        # Above, it is what the loop guard does: the rest is exact.
        if exact < own or (exact > own and self._guard.token_index is None):
            raise _Contradiction(at, f"judged exactly until position {exact}", own)

    def _window_after(self, record: RoundRecord) -> OpenWindow | None:
        """Return the window that a round leaves open, by its decisions."""
        if record.keep_length < record.start_length:
            return None  # it failed
        window = self._state.window
        for position, decision in enumerate(record.decisions, record.start_length):
            if decision.outcome is Outcome.PROVISIONAL:
                window = OpenWindow(
                    position,
                    decision.target_token_id or 0,
                    self._matches_after(record, position),
                    decision.gap_nats or 0.0,
                )
            elif decision.outcome is Outcome.EXACT and window is not None:
                left = window.remaining_matches - 1
                window = window._replace(remaining_matches=left) if left > 0 else None
        return window

    def _matches_after(self, record: RoundRecord, position: int) -> int:
        """Return how many matches the rule at a position requires after a loose token."""
        index = 0
        for segment in record.rule_segments:
            if segment.start_position <= position:
                index = segment.rule_index
        return window_of(self._recording.started.rules_by_index[index]).following

    def check_end(self) -> None:
        """Check where and why the output ends, and its text."""
        output, completion, count = (
            self._recording.output, self._recording.completion, self._num_final
        )  # fmt: skip
        if count < len(output.token_ids):
            recorded = self._shown(output.token_ids[count])
            raise _Contradiction(count, recorded, "no more tokens, by the rounds")
        last = max(0, count - 1)
        if self._output.finish_reason is None:
            raise _Contradiction(last, "the end", "more tokens: nothing ends the output here")
        own = _end(self._output.finish_reason, self._output.stop_reason)
        _same(last, "ends by", _end(completion.finish_reason, completion.stop_reason), own)
        if more := output.text[len(self._text) :]:
            raise _Contradiction(last, f"text {more!r} after it", "the end of the text")

    def _shown(self, token_id: int) -> str:
        text = self._tokenizer.bytes_of(token_id).decode(errors="replace")
        return f"token {token_id} {text!r}"


def _same(at: int, what: str, recorded: object, expected: object) -> None:
    if recorded != expected:
        raise _Contradiction(at, f"{what} {recorded}", expected)


def _end(reason: FinishReason, stop: str | int | None) -> str:
    return reason.name.lower() + ("" if stop is None else f" {stop!r}")


def _output_of(recording: Recording, tokenizer: Tokenizer) -> Output:
    """Return an output that ends as the recording says: by which stop string, if any."""
    started, completion, ids = recording.started, recording.completion, recording.output.token_ids
    stop, eos = completion.stop_reason, tokenizer.eos_token_ids
    goes_on = any(token in eos for token in ids[:-1])
    by_eos = completion.finish_reason is FinishReason.STOP and stop is None
    limits = OutputLimits(
        started.max_tokens,
        stop=(stop,) if isinstance(stop, str) else (),
        stop_token_ids=frozenset(started.stop_token_ids),
        ignore_eos=goes_on or (bool(ids) and ids[-1] in eos and not by_eos),
    )
    return Output(tokenizer, limits, started.sampling.min_tokens)
