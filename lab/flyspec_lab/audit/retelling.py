"""Follows a recording's rounds without a model, and finds where it contradicts itself.

The rounds alone determine tokens, origins and text: the same state machine and detokenizer as in
the orchestrator put them together again. Budgets, windows and the loop guard must be what the
rounds before left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.errors import FlyspecError
from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import FinishReason, Recording, RoundRecord
from flyspec.values.rounds import Budget, OpenWindow, Outcome, Verdict
from flyspec.values.tokens import Origin
from flyspec_lab.audit.report import Discrepancy, DiscrepancyKind
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.output import Output
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

    `read_token_ids` are the tokens after the prefix that the target read, drafted or its own;
    `num_kept` of them stay.
    """

    index: int
    record: RoundRecord
    prefix: Sequence[int]
    read_token_ids: Sequence[int]
    num_kept: int
    open_window: OpenWindow | None


@dataclass
class Retelling:
    """A recording as its rounds tell it, up to the first contradiction, if there is one."""

    rounds: list[RetoldRound] = field(default_factory=list)
    discrepancy: Discrepancy | None = None


def retell(recording: Recording, tokenizer: Tokenizer) -> Retelling:
    """Follow the rounds and compare them with the output."""
    return _Follower(recording, tokenizer).told


class _Contradiction(Exception):
    """A contradiction at an output token."""

    def __init__(self, token_index: int, recorded: object, expected: object) -> None:
        super().__init__()
        self.token_index, self.recorded, self.expected = token_index, recorded, expected


class _Follower:
    """The state while following the rounds."""

    def __init__(self, recording: Recording, tokenizer: Tokenizer) -> None:
        self._recording, started = recording, recording.started
        self._tokenizer = tokenizer
        self._prompt_length = len(started.prompt_token_ids)
        self._sequence = list(started.prompt_token_ids)
        self._state = WindowState(self._prompt_length, self._prompt_length + started.max_tokens)
        self._output, self._text = _output_of(recording, tokenizer), ""
        self._final: list[Token] = []
        self._guard = LoopGuard()
        self._loose_cost_nats, self._num_loose = 0.0, 0
        self.told = Retelling()
        index: int | None = None
        try:
            for index, record in enumerate(recording.rounds):
                self._round(index, record)
            index = None
            self._check_end()
        except _Contradiction as found:
            self.told.discrepancy = Discrepancy(
                DiscrepancyKind.RECORD,
                found.token_index,
                str(found.recorded),
                str(found.expected),
                index,
            )

    @property
    def _at(self) -> int:
        """The output token that comes next."""
        return len(self._sequence) - self._prompt_length

    def _round(self, index: int, record: RoundRecord) -> None:
        at = self._at
        self._same(at, "starts at position", record.start_length, len(self._sequence))
        if self._output.finish_reason is not None:
            raise _Contradiction(at, "another round", "the end of the output")
        event: Event
        window = self._state.window
        if window is not None and not record.draft_token_ids:
            self._same(at, "goes back to", (record.keep_length, record.next_token_id), window[:2])
            event = NothingDrafted()
        else:
            self._check_given(record, at)
            event = self._checked(record)
            read = record.draft_token_ids or record.plain_token_ids
            kept = max(0, record.keep_length - record.start_length)
            self.told.rounds.append(
                RetoldRound(index, record, tuple(self._sequence), read, kept, window)
            )
        try:
            self._state, commands = step(self._state, event)
        except FlyspecError as error:
            raise _Contradiction(
                at, str(error).removeprefix("verify service: "), "a verdict"
            ) from None
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
        for token in update.final:
            self._take(token)
        self._text += "".join(update.texts)
        self._same(at, "final tokens", record.committed_length, self._state.committed_length)

    def _take(self, token: Token) -> None:
        """Compare a final token with the output."""
        output, i = self._recording.output, len(self._final)
        if i >= len(output.token_ids):
            raise _Contradiction(
                i, "the end", f"token {token.token_id} {self._shown(token.token_id)}"
            )
        own, origin = output.token_ids[i], output.origins[i]
        if own != token.token_id:
            raise _Contradiction(
                i, f"token {own} {self._shown(own)}",
                f"token {token.token_id} {self._shown(token.token_id)}, by the rounds",
            )  # fmt: skip
        self._same(i, "origin", origin.name, token.origin.name)
        if token.origin is Origin.LOOSE:
            recorded = output.loose_gaps_nats[self._num_loose]
            gap = token.gap_nats or 0.0
            if not math.isclose(recorded, gap, rel_tol=1e-6, abs_tol=1e-6):
                raise _Contradiction(i, f"gap of {recorded:g} nats", f"{gap:g}")
            self._num_loose += 1
            self._loose_cost_nats += gap
        self._final.append(token)

    def _check_given(self, record: RoundRecord, at: int) -> None:
        """Check what a round was judged with: window, budget, and where judging is exact."""
        started, window = self._recording.started, self._state.window
        recorded = record.open_window
        self._same(at, "open window", recorded and recorded[:3], window and window[:3])
        left = self._budget(window)
        self._same(at, "budget of loose tokens", record.budget.loose_tokens, left.loose_tokens)
        cost = record.budget.loose_cost_nats
        if (cost is None) != (left.loose_cost_nats is None) or (
            cost is not None
            and left.loose_cost_nats is not None
            and abs(cost - left.loose_cost_nats) > _COST_TOLERANCE_NATS
        ):
            raise _Contradiction(at, f"budget of {cost} nats", left.loose_cost_nats)
        exact = record.exact_until_position
        if exact != started.exact_until_position and (
            exact < started.exact_until_position or self._guard.token_index is None
        ):
            raise _Contradiction(
                at, f"judged exactly until position {exact}", started.exact_until_position
            )
        # Else it is what the loop guard does: the rest is exact.

    def _budget(self, window: OpenWindow | None) -> Budget:
        started = self._recording.started
        tokens, cost = started.max_loose_tokens, started.max_loose_cost_nats
        if tokens is not None:
            tokens = max(0, tokens - self._num_loose - (window is not None))
        if cost is not None:
            cost = max(0.0, cost - self._loose_cost_nats - (window.gap_nats if window else 0.0))
        return Budget(tokens, cost)

    def _checked(self, record: RoundRecord) -> Checked:
        """Return the recorded verdict, with the window that it leaves open."""
        verdict = Verdict(
            record.keep_length,
            record.next_token_id,
            tuple(record.decisions),
            self._window_after(record),
            record.start_length,
            plain_token_ids=tuple(record.plain_token_ids),
        )
        return Checked(verdict, record.draft_token_ids, record.draft_origins)

    def _window_after(self, record: RoundRecord) -> OpenWindow | None:
        if record.keep_length < record.start_length:
            return None  # it failed
        window = self._state.window
        for index, decision in enumerate(record.decisions):
            if decision.outcome is Outcome.PROVISIONAL:
                window = OpenWindow(
                    record.start_length + index,
                    decision.target_token_id or 0,
                    self._matches_after(record, record.start_length + index),
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
        rule = self._recording.started.rules_by_index[index]
        return window_of(rule).following

    def _check_end(self) -> None:
        """Check where and why the output ends, and its text."""
        recording, output = self._recording, self._recording.output
        count = len(self._final)
        if count < len(output.token_ids):
            token = output.token_ids[count]
            raise _Contradiction(
                count, f"token {token} {self._shown(token)}", "no more tokens, by the rounds"
            )
        last = max(0, count - 1)
        if self._output.finish_reason is None:
            raise _Contradiction(last, "the end", "more tokens: nothing ends the output here")
        ends = recording.completion.finish_reason, recording.completion.stop_reason
        own = self._output.finish_reason, self._output.stop_reason
        self._same(last, "ends by", _end(*ends), _end(*own))
        if output.text != self._text:
            raise _Contradiction(*self._differing_text(output.text))

    def _differing_text(self, recorded: str) -> tuple[int, str, str]:
        """Return the token where the text first differs, and both texts from there on."""
        same = next(
            (i for i, (a, b) in enumerate(zip(recorded, self._text, strict=False)) if a != b),
            min(len(recorded), len(self._text)),
        )
        detokenizer, length, token_index = self._tokenizer.detokenizer(), 0, 0
        for token in self._final:
            length += len(detokenizer.push(token.token_id))
            if length > same:
                break
            token_index += 1
        piece = slice(max(0, same - 8), same + 16)
        return token_index, f"text {recorded[piece]!r}", f"{self._text[piece]!r}, by the tokens"

    def _shown(self, token_id: int) -> str:
        return repr(self._tokenizer.bytes_of(token_id).decode(errors="replace"))

    @staticmethod
    def _same(at: int, what: str, recorded: object, expected: object) -> None:
        if recorded != expected:
            raise _Contradiction(at, f"{what} {recorded}", expected)


def _end(reason: FinishReason, stop: str | int | None) -> str:
    return reason.name.lower() + ("" if stop is None else f" {stop!r}")


def _output_of(recording: Recording, tokenizer: Tokenizer) -> Output:
    """Return an output that ends as the recording says: by which stop string, if any."""
    started, completion, ids = recording.started, recording.completion, recording.output.token_ids
    stop = completion.stop_reason
    eos = tokenizer.eos_token_ids
    goes_on = any(token in eos for token in ids[:-1])
    by_eos = completion.finish_reason is FinishReason.STOP and stop is None
    return Output(
        tokenizer,
        started.max_tokens,
        (stop,) if isinstance(stop, str) else (),
        goes_on or (bool(ids) and ids[-1] in eos and not by_eos),
        started.stop_token_ids,
        started.sampling.min_tokens,
    )
