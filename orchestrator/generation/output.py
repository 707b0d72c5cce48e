"""Turns tokens into the client's output: text, and where it ends.

Text that may be part of a character or the beginning of a stop string is held back, so that nothing
past the end of the output leaks. With eager, provisional tokens are shown too, and retracted if
they are not accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flyspec.tokenizer import Detokenizer, Tokenizer
from flyspec.values.generation import Chunk, FinishReason, Retract
from flyspec.values.tokens import Origin
from orchestrator.generation.plan import OutputLimits
from orchestrator.generation.window import Command, Commit, Hide, Show, Token


@dataclass(slots=True)
class Update:
    """A round's changes for the client: a retraction, if any, then tokens to send.

    `texts` holds the text completed by each of `tokens`. `final` are the tokens that became final
    (without eager, the same as `tokens`); `num_final_tokens` counts all that are final now.
    `bytes_of` returns a token's bytes.
    """

    bytes_of: Callable[[int], bytes]
    tokens: list[Token] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    final: list[Token] = field(default_factory=list)
    num_final_tokens: int = 0
    retraction: Retract | None = None

    @property
    def events(self) -> Iterator[Retract | Chunk]:
        if self.retraction is not None:
            yield self.retraction
        if self.tokens or self.final:
            tokens = self.tokens
            yield Chunk(
                text="".join(self.texts),
                token_ids=[t.token_id for t in tokens],
                origins=[t.origin for t in tokens],
                token_texts=self.texts,
                num_final_tokens=self.num_final_tokens,
                loose_gaps_nats=[t.gap_nats or 0.0 for t in tokens if t.origin is Origin.LOOSE],
                logprobs=[
                    t.logprobs.spelled(t.token_id, self.bytes_of) for t in tokens if t.logprobs
                ],
            )


class _Mark(NamedTuple):
    """The state at the last final token, restored when provisional tokens are retracted."""

    detokenizer: Detokenizer
    held: str
    num_text_bytes: int


def held_back(text: str, stop: Sequence[str]) -> int:
    """Return how many trailing characters of `text` may be the beginning of a stop string."""
    longest = min(len(text), max((len(s) - 1 for s in stop), default=0))
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(s) > length and s.startswith(tail) for s in stop):
            return length
    return 0


class Output:
    """A request's output; `finish_reason` is set once it is complete.

    If provisional tokens reach the end, no token after it is shown, and it takes effect once they
    are final. `num_tokens` counts tokens sent, `num_final_tokens` those that are final.
    """

    def __init__(self, tokenizer: Tokenizer, limits: OutputLimits, min_tokens: int = 0) -> None:
        self._detokenizer, self._bytes_of = tokenizer.detokenizer(), tokenizer.bytes_of
        self._eos = frozenset[int]() if limits.ignore_eos else tokenizer.eos_token_ids
        self._limits, self._min_tokens = limits, min_tokens
        self._held = ""
        self._num_text_bytes = 0
        self._end: tuple[FinishReason, str | int | None] | None = None
        self._mark: _Mark | None = None
        self.num_tokens = self.num_final_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def apply(self, commands: Sequence[Command]) -> Update:
        update = Update(self._bytes_of)
        for command in commands:
            if self.finish_reason is not None:
                break
            if isinstance(command, Commit):
                self._commit(command.tokens, update)
            elif isinstance(command, Show):
                self._show(command.tokens, update)
            elif isinstance(command, Hide):
                self._hide(update)
        update.num_final_tokens = self.num_final_tokens
        return update

    def _commit(self, tokens: Sequence[Token], update: Update) -> None:
        self._push(tokens[self.num_tokens - self.num_final_tokens :], update)
        update.final += tokens[: self.num_tokens - self.num_final_tokens]
        self.num_final_tokens = self.num_tokens
        self._mark = None
        if self._end is not None:
            self.finish_reason, self.stop_reason = self._end

    def _show(self, tokens: Sequence[Token], update: Update) -> None:
        if self._mark is None:
            self._mark = _Mark(self._detokenizer.copy(), self._held, self._num_text_bytes)
        self._push(tokens, update)

    def _hide(self, update: Update) -> None:
        if self._mark is None:
            return
        self._detokenizer, self._held, self._num_text_bytes = self._mark
        self._mark = self._end = None
        self.num_tokens = self.num_final_tokens
        update.retraction = Retract(self.num_tokens, self._num_text_bytes)

    def _push(self, tokens: Sequence[Token], update: Update) -> None:
        """Detokenize into the update, up to the end of the output."""
        for token in tokens:
            if self._end is not None:
                break
            self.num_tokens += 1
            text = self._text_of(token.token_id)
            if self._end is None and self.num_tokens >= self._limits.max_tokens:
                self._end = FinishReason.LENGTH, None
            if self._end is not None:
                text += self._finish(self._end[1])
            self._num_text_bytes += len(text.encode())
            update.tokens.append(token)
            update.texts.append(text)

    def _text_of(self, token_id: int) -> str:
        """Return the text to send with this token; sets the end at EOS and what stops."""
        if token_id in self._eos:
            self._end = FinishReason.STOP, None
            return ""
        if token_id in self._limits.stop_token_ids and self.num_tokens > self._min_tokens:
            self._end = FinishReason.STOP, token_id
            return ""
        return self._release(self._detokenizer.push(token_id))

    def _release(self, text: str) -> str:
        """Return held and new text up to a stop string, minus what must be held back."""
        if not self._limits.stop:
            return text
        text = self._held + text
        if (found := self._first_stop(text)) is not None:
            self._held = ""
            self._end = FinishReason.STOP, found[1]
            return text[: found[0]]
        hold = held_back(text, self._limits.stop)
        self._held = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold]

    def _finish(self, stop_reason: str | int | None) -> str:
        """Return the text still held back at the end, unless a stop string matched."""
        if isinstance(stop_reason, str):
            return ""
        text, self._held = self._held + self._detokenizer.flush(), ""
        if (found := self._first_stop(text)) is None:
            return text
        self._end = FinishReason.STOP, found[1]
        return text[: found[0]]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Return where the first stop string is, and the longest there; None if there is none."""
        found = (
            (at, -len(stop), stop) for stop in self._limits.stop if (at := text.find(stop)) >= 0
        )
        first = min(found, default=None)
        return first and (first[0], first[2])
