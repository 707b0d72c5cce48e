"""The client's side of a generation: from final tokens to text, and where the output ends.

Holds text back while it could still become half a character or the beginning of a stop string, so
that nothing past the end of the output leaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.tokenizer import Tokenizer
from flyspec.types import FinishReason, Origin


@dataclass(slots=True)
class Piece:
    """Final tokens with the text that became complete with each."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of all of them."""
        return "".join(self.texts)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of a stop string."""
    longest = min(len(text), max((len(s) - 1 for s in stop), default=0))
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(s) > length and s.startswith(tail) for s in stop):
            return length
    return 0


class Output:
    """What a request has produced; `finish_reason` is set when it is complete."""

    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, stop: Sequence[str], ignore_eos: bool
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._eos = frozenset[int]() if ignore_eos else tokenizer.eos_token_ids
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._held = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int], origins: Sequence[Origin]) -> Piece:
        """Take in final tokens up to the end of the output; what can be sent now."""
        piece = Piece()
        for token_id, origin in zip(token_ids, origins, strict=True):
            self.num_tokens += 1
            text = self._text_of(token_id)
            if self.finish_reason is None and self.num_tokens >= self._max_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                text += self._finish()
            piece.token_ids.append(token_id)
            piece.origins.append(origin)
            piece.texts.append(text)
            if self.finish_reason is not None:
                break
        return piece

    def _text_of(self, token_id: int) -> str:
        """The text to send with this token; sets the finish reason at EOS and stop strings."""
        if token_id in self._eos:
            self.finish_reason = FinishReason.STOP
            return ""
        return self._release(self._detokenizer.push(token_id))

    def _release(self, text: str) -> str:
        """Held and new text up to a stop string, less what must be held back."""
        if not self._stop:
            return text
        text = self._held + text
        found = min(((i, -len(s), s) for s in self._stop if (i := text.find(s)) >= 0), default=None)
        if found is not None:
            self._held = ""
            self.finish_reason, self.stop_reason = FinishReason.STOP, found[2]
            return text[: found[0]]
        hold = held_back(text, self._stop)
        self._held = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold]

    def _finish(self) -> str:
        """Text that was held back although nothing came of it."""
        if self.stop_reason is not None:
            return ""
        held, self._held = self._held, ""
        return held + self._detokenizer.flush()
