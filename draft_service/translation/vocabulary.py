"""A tokenizer for translation: ids to bytes and back, from anywhere in a text.

No torch. A token stands for bytes, not characters: byte-level and byte-fallback tokens can end
inside a character. Control tokens stand for no text and are never produced from text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tokenizers import Tokenizer as RustTokenizer

from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import TokenBytes

HELD_BACK = 5
"""Maximum unsettled tokens at the end of a growing text; merges rarely reach further."""
SAMPLE = (
    ' The "quick" (brown) fox\'s 12,345 jumps:\n\n    over = [the, lazy];  # dogs & cats\tend.\n'
)
"""Text that a tokenizer must reproduce; most text is like this, whatever else it loses."""


class Encoded(NamedTuple):
    """Bytes as tokens: ids, and where in the bytes each ends.

    The first `num_exact` reproduce their bytes; what follows is only similar to the text. The first
    `num_settled` are unlikely to change when the text continues.
    """

    ids: list[int]
    ends: list[int]
    num_exact: int
    num_settled: int


class Vocabulary:
    """A tokenizer's ids and the bytes that they stand for.

    `control_token_ids` are not text, and only ids below `vocab_size` are produced. Raises
    `InvalidArgumentError` if `tokenizer_json` cannot be read or does not reproduce plain text.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        eos_token_ids: Sequence[int],
        control_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        try:
            original = _without_cache(RustTokenizer.from_buffer(tokenizer_json))
            self.all_bytes = TokenBytes(original).all()
            """As in the fingerprint: control tokens stand for their names."""
            self._tokenizer = _without_cache(
                RustTokenizer.from_str(json.dumps(_from_anywhere(json.loads(original.to_str()))))
            )
            self._tokenizer.encode_special_tokens = True  # the name of one is text
            self.head = _head(original)
        except Exception as error:  # tokenizers has no exception of its own
            raise InvalidArgumentError(f"tokenizer.json cannot be read: {error}") from error
        self.vocab_size = vocab_size
        self.eos = tuple(eos_token_ids)
        self.control = {i: self.all_bytes.get(i, b"") for i in (*control_token_ids, *self.eos)}
        self.bytes = {
            i: data
            for i, data in self.all_bytes.items()
            if i < vocab_size and i not in self.control
        }
        """The bytes of each id that is text."""
        self._single = {data[0]: i for i, data in self.bytes.items() if len(data) == 1}
        self._merges = any(len(data) > 1 for data in self.bytes.values())
        self._splits_words = True
        probe = self.encode(SAMPLE.encode())
        if probe.num_exact < len(probe.ids) or probe.ends[-1:] != [len(SAMPLE)]:
            raise InvalidArgumentError(
                "tokenizer.json does not reproduce plain text (it changes case or spaces, or "
                "lacks characters), so it cannot be translated; use a draft model with the "
                "target's tokenizer, or the drafter prompt_lookup"
            )
        words = self._tokenizer.encode("a b", add_special_tokens=False).word_ids
        self._splits_words = len(set(words)) > 1

    def id_of(self, data: bytes) -> int | None:
        """Return the token for exactly these bytes, if there is one."""
        found = self.encode(data)
        return found.ids[0] if len(found.ids) == found.num_exact == 1 else None

    def encode(self, data: bytes) -> Encoded:
        """Encode bytes, UTF-8 or not, never as control tokens.

        What the tokenizer would change or lose becomes byte tokens if it has them, otherwise at
        most one similar token per character.
        """
        text, used = _decode(data)
        if used == len(data) and (found := self._plain(text, data)) is not None:
            return found
        parts, view = _Parts(), memoryview(data)
        while True:
            if text:
                self._piecewise(text, parts)
            if used == len(view):
                return parts.encoded()
            self._by_bytes(bytes(view[used : used + 1]), parts)  # a byte that is not UTF-8
            view = view[used + 1 :]
            text, used = _decode(view)

    def _plain(self, text: str, data: bytes) -> Encoded | None:
        """Return the tokenizer's encoding of a text if it reproduces the text."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # it lacks a token that it needs, such as the unknown token
            return None
        ids: list[int] = encoding.ids
        pieces = [self.bytes.get(i, b"") for i in ids]
        if b"".join(pieces) != data:
            return None
        ends = list(accumulate(map(len, pieces)))
        return Encoded(ids, ends, len(ids), self._settled(ids, encoding))

    def _settled(self, ids: list[int], encoding: Any) -> int:
        """Return how many tokens come before the last word, or before its last tokens."""
        if not self._merges:
            return len(ids)
        at = len(ids) - 1
        least = max(at - HELD_BACK + 1, 0)
        if self._splits_words:
            words = encoding.word_ids
            while at > least and words[at] == words[at - 1]:
                at -= 1
        else:
            while at > least and not self.bytes[ids[at]][:1].isspace():
                at -= 1
        return max(at, 0)

    def _piecewise(self, text: str, parts: _Parts) -> None:
        """Add a text's tokens, halving it around what cannot be reproduced."""
        data = text.encode()
        if (found := self._plain(text, data)) is not None:
            parts.add(found.ids, found.ends)
        elif len(text) > 1:
            middle = _middle(text)
            self._piecewise(text[:middle], parts)
            self._piecewise(text[middle:], parts)
        else:
            self._by_bytes(data, parts, text)

    def _by_bytes(self, data: bytes, parts: _Parts, like: str = "\ufffd") -> None:
        """Add byte tokens for `data`, or without them the tokenizer's first token for `like`."""
        single = self._single
        if all(byte in single for byte in data):
            parts.add([single[byte] for byte in data], range(1, len(data) + 1))
            return
        try:
            ids = self._tokenizer.encode(like, add_special_tokens=False).ids
        except Exception:
            ids = []
        parts.add_like([i for i in ids if i in self.bytes][:1], len(data))


class _Parts:
    """Tokens of a text assembled from pieces."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._length = 0
        self._num_exact: int | None = None

    def add(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        """Add tokens that reproduce their bytes; ends count from the piece's beginning."""
        self._ids += ids
        self._ends += [self._length + end for end in ends]
        self._length += ends[-1] if ends else 0

    def add_like(self, ids: Sequence[int], length: int) -> None:
        """Add at most one token in place of a piece of `length` bytes."""
        if self._num_exact is None:
            self._num_exact = len(self._ids)
        self._length += length
        self._ids += ids
        self._ends += [self._length] * len(ids)

    def encoded(self) -> Encoded:
        count = len(self._ids)
        exact = count if self._num_exact is None else self._num_exact
        return Encoded(self._ids, self._ends, exact, max(count - HELD_BACK, 0))


def num_whole(data: bytes) -> int:
    """Return how many bytes of `data` precede an incomplete character at its end."""
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # not a continuation byte
            length = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
            if 0xC2 <= lead < 0xF5 and length > back:
                return len(data) - back
            break
    return len(data)


def _middle(text: str) -> int:
    """Return where to halve a text: before a space, if there is one."""
    middle = len(text) // 2
    before = text.rfind(" ", 1, middle + 1)
    found = before if before > 0 else text.find(" ", middle)
    return found if found > 0 else middle


def _decode(data: bytes | memoryview) -> tuple[str, int]:
    """Return the text of `data` up to the first byte that is not UTF-8, and its byte count."""
    try:
        # Without `final`, a character cut off by the end is left out, not an error.
        return codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError as error:
        return codecs.utf_8_decode(data[: error.start])[0], error.start


def _from_anywhere(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that encodes a piece of a text without adding anything."""
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    if spec["model"].get("dropout"):
        spec["model"]["dropout"] = None
    spec["normalizer"] = _without_prefix(spec.get("normalizer"))
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"))
    return spec


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer that puts no space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [kept for p in part[key] if (kept := _without_prefix(p)) is not None]
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    if part["type"] == "Metaspace":
        part |= {"prepend_scheme": "never"}
        part.pop("add_prefix_space", None)
    return part


def _without_cache(tokenizer: RustTokenizer) -> RustTokenizer:
    """Keep no words: tokenizers 0.23 does not free that cache together with the tokenizer."""
    if hasattr(tokenizer.model, "_resize_cache"):  # not if it only looks words up
        tokenizer.model._resize_cache(0)
    return tokenizer


def _head(tokenizer: RustTokenizer) -> list[int]:
    """Return the special tokens that the tokenizer itself puts before a text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode("a")
    ids: list[int] = encoding.ids
    special: list[int] = encoding.special_tokens_mask
    return ids[: special.index(0)] if 0 in special else []


class Translator:
    """Two vocabularies. Control tokens are not text: they map by name, and EOS maps to EOS."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        in_draft = {name: i for i, name in draft.all_bytes.items() if name}
        in_target = {name: i for i, name in target.control.items() if name}
        self._to_draft = {i: in_draft[name] for name, i in in_target.items() if name in in_draft}
        if draft.eos:
            self._to_draft = dict.fromkeys(target.eos, draft.eos[0]) | self._to_draft
        self._to_target = {
            i: in_target[name] for i, name in draft.control.items() if name in in_target
        }
        self._separator = draft.id_of(b"\n")
        beginnings = (*draft.head, *draft.eos, self._separator)
        self.filler = next((i for i in beginnings if i is not None), 0)
        """The token in a draft's context that would otherwise be empty."""

    def control_in_draft(self, token: int, after_text: bool) -> int | None:
        """Return the draft's token for a target's control token, if any.

        That is the one of the same name, or else a newline where text would run together.
        """
        found = self._to_draft.get(token)
        return self._separator if found is None and after_text else found

    def control_in_target(self, token: int, eos: int | None) -> int | None:
        """Return the target's control token for a draft's, if any; `eos` is the target's EOS."""
        found = self._to_target.get(token)
        if token in self.draft.eos and found not in self.target.eos:
            return eos
        return found
