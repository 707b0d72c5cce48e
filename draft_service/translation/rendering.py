"""A draft's output as target tokens that follow the existing ones."""

from __future__ import annotations

from draft_service.translation.stream import TextStream
from draft_service.translation.vocabulary import Encoded, Vocabulary, num_whole
from flyspec.values.tokens import Origin

TAIL = 6
"""Maximum tokens before a proposal encoded along with it, back to the beginning of a word."""


class Rendering:
    """Turns a proposal's text into tokens, a few at a time, and appends them to a stream.

    Existing ids do not change: where the whole text would be split differently, the added text is
    encoded by itself.
    """

    def __init__(self, vocabulary: Vocabulary, stream: TextStream) -> None:
        self._vocabulary, self._stream = vocabulary, stream
        self.begin()

    def begin(self) -> None:
        self._text = bytearray()  # not yet tokens
        self._looked_up = bytearray()  # per byte of the text
        self._tried = 0  # bytes of it left after the last encoding
        self._held = 0  # tokens that were not settled then
        self._more = False  # whether more were settled than taken
        self._complete = False  # nothing follows the text
        self._control: int | None = None  # except this
        self._control_origin = Origin.EXACT_MODEL
        self.stopped = False
        """True if further additions are ignored."""

    def add(self, text: bytes, origin: Origin) -> None:
        if not self.stopped:
            self._text += text
            self._looked_up += bytes([origin is Origin.EXACT_LOOKUP]) * len(text)

    def end(self, control: int | None, origin: Origin) -> None:
        """End the text with a control token, which is proposed only if it ends sequences."""
        if not self.stopped:
            self.stopped = self._complete = True
            if control in self._vocabulary.eos:
                self._control, self._control_origin = control, origin

    def break_off(self) -> None:
        """Stop in the middle of a text whose continuation is unknown or has no tokens."""
        self.stopped = True

    def take(self, limit: int) -> tuple[list[int], list[Origin]]:
        """Return at most `limit` (>= 1) settled tokens of the text, with their origins."""
        ids: list[int] = []
        origins: list[Origin] = []
        # A token has at least one byte, and the next may settle every one held back.
        enough = len(self._text) >= self._tried + max(limit - self._held, 1)
        if self._text and (enough or self._more or self.stopped):
            made, skipped = self._encode()
            settled = len(made.ids) if self._complete else made.num_settled
            if settled > made.num_exact:  # the target cannot express it all
                settled = made.num_exact
                self.break_off()
                self._control = None
            ids = made.ids[skipped : max(min(settled, skipped + limit), skipped)]
            self._more = settled > skipped + len(ids)
            self._held = len(made.ids) - settled
            start = begin = made.ends[skipped - 1] if skipped else 0
            for end in made.ends[skipped : skipped + len(ids)]:
                looked_up = all(self._looked_up[start - begin : end - begin])
                origins.append(Origin.EXACT_LOOKUP if looked_up else Origin.EXACT_MODEL)
                start = end
            del self._text[: start - begin], self._looked_up[: start - begin]
            self._tried = len(self._text)
        if self._control is not None and not self._text and len(ids) < limit:
            ids = [*ids, self._control]
            origins.append(self._control_origin)
            self._control = None
        self._stream.extend(ids)
        return ids, origins

    def _encode(self) -> tuple[Encoded, int]:
        """Encode the text up to its last whole character, after a number of existing tokens."""
        tail_ids, tail = self._tail()
        text = tail + self._text
        whole = num_whole(text)
        if whole <= len(tail):
            return Encoded([], [], 0, 0), 0
        if tail:
            made = self._vocabulary.encode(text[:whole])
            count = len(tail_ids)
            if made.ids[:count] == tail_ids and made.num_exact >= count:
                return made, count
        return self._vocabulary.encode(text[len(tail) : whole]), 0

    def _tail(self) -> tuple[list[int], bytes]:
        """Return the last existing tokens, from the beginning of a word on, and their text."""
        known = self._vocabulary.bytes
        parts: list[bytes] = []
        ids: list[int] = []
        for token in reversed(self._stream.token_ids[-TAIL:]):
            data = known.get(token)
            if not data:
                break
            ids.append(token)
            parts.append(data)
            if data[:1].isspace():
                break
        while parts and 0x80 <= parts[-1][0] < 0xC0:  # in the middle of a character
            ids.pop()
            parts.pop()
        return ids[::-1], b"".join(reversed(parts))
