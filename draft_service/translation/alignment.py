"""A draft's tokens for a target's sequence, and the target's tokens for a draft's output.

The draft's tokens are kept where they still fit, otherwise re-encoded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

from draft_service.translation.vocabulary import Encoded, Translator, Vocabulary, num_whole
from flyspec.prefix import num_same
from flyspec.values.tokens import Origin

TAIL = 6
"""Maximum tokens before a proposal encoded along with it, back to the beginning of a word."""
NOWHERE = -1
"""The unit of draft output that the target has no token for; in no stream."""
BACK = 4
"""Draft tokens before a change that are re-encoded first; four times as many if none agrees."""
MAX_BACK = 256
SAFE_WITHIN = 64
"""Draft tokens searched for a good place to cut a long context."""
BYTES_PER_TOKEN = 8
"""Bytes considered per token that the draft holds when a context is too long for it."""
CONTROL = 256
"""Units below this are bytes of text; a control token's unit is this plus the target's id."""

_SPACE = frozenset(b" \t\r\n")


class TextStream:
    """Token ids of a vocabulary and their units. Places are counted in units."""

    def __init__(self, vocabulary: Vocabulary, token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.token_ids: list[int] = []
        self.units: list[int] = []
        self._ends: list[int] = []  # of each token
        self._controls: list[int] = []  # places of control tokens
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.units)

    def end_of(self, length: int) -> int:
        return self._ends[length - 1] if length else 0

    def truncate(self, length: int) -> None:
        end = self.end_of(length)
        del self.token_ids[length:], self._ends[length:], self.units[end:]
        del self._controls[bisect_left(self._controls, end) :]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; ids without content, such as padding, add no units."""
        units, text, control = self.units, self._vocabulary.bytes, self._vocabulary.control
        for token in token_ids:
            if token in control:
                self._controls.append(len(units))
                units.append(CONTROL + token)
            else:
                units += text.get(token, b"")
            self._ends.append(len(units))
        self.token_ids += token_ids

    def text(self, start: int, end: int) -> bytes:
        """Return the text between two places, which must contain no control token."""
        return bytes(self.units[start:end])

    def text_start(self, place: int) -> int:
        """Return where the text before `place` begins: after a control token, or at the start."""
        index = bisect_left(self._controls, place)
        return self._controls[index - 1] + 1 if index else 0

    def text_end(self, place: int) -> int:
        """Return where the text from `place` on ends: before a control token, or at the end."""
        index = bisect_left(self._controls, place)
        return self._controls[index] if index < len(self._controls) else len(self.units)

    def is_control(self, place: int) -> bool:
        return place < len(self.units) and self.units[place] >= CONTROL

    def is_inside(self, place: int) -> bool:
        """Return whether `place` is in the middle of a character."""
        return place < len(self.units) and 0x80 <= self.units[place] < 0xC0

    def is_space(self, place: int) -> bool:
        return place < len(self.units) and self.units[place] in _SPACE


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


class Alignment:
    """A target's sequence, and the same text in at most `draft_length` (>= 2) draft tokens.

    If the text is too long for the draft, these cover its end. Call `move`, `sync`, then `feed` and
    `take` for the draft's output.
    """

    def __init__(self, translator: Translator, token_ids: Sequence[int], draft_length: int) -> None:
        self._translator = translator
        self._draft = translator.draft
        self._limit = draft_length
        self._stream = TextStream(translator.target, token_ids)
        self.draft_ids: list[int] = []
        """The draft's sequence, including all its output."""
        self._ends: list[int] = []  # places in the stream
        self._anchor = 0  # where in the stream the draft's text begins
        self._shortened = False  # whether only the text's end is kept
        self._agreed = 0  # up to here the draft's tokens are known to fit
        self._unchanged = 0  # the draft's first tokens, unchanged since the last `sync`
        self._drawn: list[int] = []  # units of the draft's output after `_agreed`
        self._filled = False  # whether the filler stands in for an empty sequence
        eos = translator.target.eos
        self._eos = next((t for t in reversed(token_ids) if t in eos), next(iter(eos), None))
        self._rendering = Rendering(translator.target, self._stream)
        self.ready = False
        """True if the draft can continue at the end of the sequence: not inside a character that it
        cannot spell."""
        self._rebuild()

    @property
    def token_ids(self) -> Sequence[int]:
        return self._stream.token_ids

    @property
    def stopped(self) -> bool:
        """True if no further output of the draft can be used."""
        return self._rendering.stopped

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Set the target's sequence to its first `keep_length` tokens plus those appended."""
        stream, drawn = self._stream, self._drawn
        end, agreed = stream.end_of(keep_length), self._agreed
        stream.truncate(keep_length)
        stream.extend(append_token_ids)
        if end < agreed:
            self._agreed = end
        else:
            self._agreed += num_same(drawn, stream.units[agreed : agreed + len(drawn)])
        drawn.clear()
        self._drop(bisect_right(self._ends, self._agreed))

    def sync(self, reserve: int) -> tuple[int, list[int]]:
        """Bring the draft's tokens up to date, with room for `reserve` more, at most half of all.

        Returns how many of its tokens are unchanged, and those that follow them.
        """
        stream = self._stream
        if self._drawn:
            self.move(len(stream.token_ids), [])
        if self._filled:
            self._drop(0)
            self._filled = False
        if self._must_rebuild():
            self._rebuild()
        elif self._start_of(len(self.draft_ids)) < len(stream):
            self._extend()
        if len(self.draft_ids) + reserve > self._limit:
            self._shorten(self._limit // 2)
        if not self.draft_ids:
            self._filled = True
            self._add([self._translator.filler], [self._anchor])
        rest = stream.text(self._start_of(len(self.draft_ids)), len(stream))
        self.ready = num_whole(rest) == len(rest)
        self._agreed = len(stream)
        self._rendering.begin()
        kept, self._unchanged = self._unchanged, len(self.draft_ids)
        return kept, self.draft_ids[kept:]

    def feed(self, token_ids: Iterable[int], origins: Iterable[Origin]) -> None:
        """Record tokens that the draft added to its sequence."""
        drawn, rendering = self._drawn, self._rendering
        for token, origin in zip(token_ids, origins, strict=True):
            data = self._draft.bytes.get(token)
            if data is not None:
                drawn += data
                rendering.add(data, origin)
            elif token in self._draft.control:
                control = self._translator.control_in_target(token, self._eos)
                drawn.append(NOWHERE if control is None else CONTROL + control)
                rendering.end(control, origin)
            else:
                drawn.append(NOWHERE)
                rendering.break_off()
            self._add([token], [self._agreed + len(drawn)])
        self._unchanged = len(self.draft_ids)

    def stop(self) -> None:
        """End the draft's output, so that settled tokens can be taken."""
        self._rendering.break_off()

    def take(self, limit: int) -> tuple[list[int], list[Origin]]:
        """Return at most `limit` (>= 1) target tokens for what was fed, and their origins.

        They become part of the sequence. Text that may still become other tokens is held back,
        perhaps all of it until it may suffice for `limit` tokens.
        """
        return self._rendering.take(limit)

    def _drop(self, count: int) -> None:
        del self.draft_ids[count:], self._ends[count:]
        self._unchanged = min(self._unchanged, count)

    def _add(self, ids: Iterable[int], ends: Iterable[int]) -> None:
        self.draft_ids += ids
        self._ends += ends

    def _start_of(self, index: int) -> int:
        """Return where in the stream the draft's token `index`, or what follows, begins."""
        return max(self._ends[index - 1] if index else 0, self._anchor)

    def _must_rebuild(self) -> bool:
        """Return whether a rollback removed the draft's first text, or most of a shortened text."""
        if not self._agreed or self._agreed < self._anchor:
            return True
        width = len(self._stream) - self._anchor
        few = len(self.draft_ids) < self._limit // 4
        return self._shortened and few and width < self._limit * BYTES_PER_TOKEN // 2

    def _extend(self) -> None:
        """Encode the text that the draft does not have yet, re-encoding the tokens just before.

        How a tokenizer splits a text depends on what follows, so the last tokens may differ now. If
        the first re-encoded one is the same as before, so is everything before it.
        """
        stream, count, head = self._stream, len(self.draft_ids), len(self._draft.head)
        start = self._start_of(count)
        if stream.is_control(start):
            self._extend_from(start)
            return
        floor, end = max(self._anchor, stream.text_start(start)), stream.text_end(start)
        back = BACK
        while True:
            first = max(count - back, head)
            while first < count and self._start_of(first) < floor:
                first += 1
            while first > head and self._start_of(first) > floor and self._is_inside(first):
                first -= 1
            at = self._start_of(first)
            made = self._encode(at, end)
            ends = [at + e for e in made.ends]
            same = min(
                num_same(made.ids, self.draft_ids[first:]), num_same(ends, self._ends[first:])
            )
            if same or at <= floor or back >= MAX_BACK:
                break
            back *= 4
        self._drop(first + same)
        self._add(made.ids[same:], ends[same:])
        self._extend_from(end)

    def _extend_from(self, at: int) -> None:
        """Encode the stream from a control token or the beginning of a text."""
        stream, total = self._stream, len(self._stream)
        while at < total:
            if stream.is_control(at):
                after_text = at > self._anchor and not stream.is_control(at - 1)
                control = stream.units[at] - CONTROL
                token = self._translator.control_in_draft(control, after_text)
                at += 1
                if token is not None:
                    self._add([token], [at])
                elif self._ends:
                    self._ends[-1] = at
                else:
                    self._anchor = at
            else:
                end = stream.text_end(at)
                made = self._encode(at, end)
                self._add(made.ids, [at + e for e in made.ends])
                at = end

    def _encode(self, start: int, end: int) -> Encoded:
        """Encode a text; a partial character at its end only if the draft can spell it."""
        data = self._stream.text(start, end)
        made, whole = self._draft.encode(data), num_whole(data)
        spelt = made.num_exact == len(made.ids) and made.ends[-1:] == [len(data)]
        return made if spelt or whole == len(data) else self._draft.encode(data[:whole])

    def _rebuild(self) -> None:
        """Encode the whole stream, or the end of a long one."""
        stream, head, before = self._stream, self._draft.head, self.draft_ids
        self._anchor = max(len(stream) - BYTES_PER_TOKEN * self._limit, 0)
        self._shortened = self._anchor > 0
        while self._shortened and stream.is_inside(self._anchor):
            self._anchor += 1
        at = self._anchor
        if not at and stream.is_control(0) and head:
            # The stream may already begin with what the draft's tokenizer puts before a text.
            first = self._translator.control_in_draft(stream.units[0] - CONTROL, False)
            at = int([first] == head)
        self.draft_ids, self._ends = list(head), [at if at <= 1 else 0] * len(head)
        self._extend_from(at)
        if len(self.draft_ids) > self._limit:
            self._shorten(self._limit // 2)
        self._unchanged = min(self._unchanged, num_same(before, self.draft_ids))
        self._agreed = len(stream)

    def _shorten(self, length: int) -> None:
        """Keep the head and the text's last tokens, at most `length` in total."""
        count, head = len(self.draft_ids), len(self._draft.head)
        first = max(count - max(length - head, 1), head)
        near = range(first, min(first + min(SAFE_WITHIN, length // 4), count))
        whole = (i for i in islice(range(first, count), 4) if not self._is_inside(i))
        first = next((i for i in near if self._begins(i)), next(whole, first))
        self._anchor, self._shortened = self._start_of(first), True
        self._unchanged = min(self._unchanged, head)
        del self.draft_ids[head:first], self._ends[head:first]

    def _is_inside(self, index: int) -> bool:
        """Return whether the draft's token `index`, or what follows, begins inside a character."""
        return self._stream.is_inside(self._start_of(index))

    def _begins(self, index: int) -> bool:
        """Return whether the draft's token `index` begins a word or is a control token."""
        at = self._start_of(index)
        return self._stream.is_space(at) or self._stream.is_control(at)
