"""Keeps clients from writing special tokens: in a chat, their text stays text.

A tokenizer looks for special tokens in a text first, whoever wrote it. So the punctuation in what a
client wrote of one is rendered as stand-ins, which that search does not know; a normalizer turns
them back after it. Whatever else is in a chat is encoded as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers

from flyspec.errors import InvalidArgumentError
from flyspec.values.chat import Chat

_STAND_INS = 0x10F000
"""The first stand-in; characters for private use, of which hardly anybody uses these."""


class SpecialTokens:
    """The special tokens of a tokenizer: those of `token_ids` that it looks for in a text.

    `tokenizer` encodes rendered chats with stand-ins. It shares the original's vocabulary.
    """

    def __init__(self, original: RustTokenizer, token_ids: Collection[int]) -> None:
        added = original.get_added_tokens_decoder()
        self._texts = {i: added[i].content for i in token_ids if i in added}
        self._search = RustTokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._search.add_special_tokens([*self._texts.values()])
        self._sought = self._search.get_added_tokens_decoder()
        texts = self._texts.values()
        self._marks = sorted({c for text in texts for c in text if not _in_words(c)})
        stand_ins = [chr(_STAND_INS + i) for i in range(len(self._marks))]
        self._table = str.maketrans(dict(zip(self._marks, stand_ins, strict=True)))
        self._beginnings = frozenset(text[:k] for text in texts for k in range(1, len(text)))
        self._endings = frozenset(text[k:] for text in texts for k in range(1, len(text)))
        self._joined, self._longest = "\0".join(texts), max(map(len, texts), default=0)

        self.tokenizer = RustTokenizer(original.model)
        if original.pre_tokenizer is not None:
            self.tokenizer.pre_tokenizer = original.pre_tokenizer
        steps = [*map(normalizers.Replace, stand_ins, self._marks)]
        own = [] if original.normalizer is None else [original.normalizer]
        self.tokenizer.normalizer = normalizers.Sequence([*steps, *own])
        self.tokenizer.add_tokens([added[i] for i in sorted(added)])
        self._ids = {self.tokenizer.token_to_id(token.content): i for i, token in added.items()}
        self._unknown = getattr(original.model, "unk_token", None)

    def as_text(self, chat: Chat) -> Chat:
        """Return a chat with stand-ins, or the chat itself if it needs none.

        Raises `InvalidArgumentError` for one that is nested too deeply.
        """
        texts = {text for text in chat.texts if any(mark in text for mark in self._marks)}
        whole = self._found("\0".join(texts))
        changed = {text: shown for text in texts if (shown := self._shown(text, whole)) != text}
        if not changed:
            return chat
        try:
            return chat.with_texts(lambda text: changed.get(text, text))
        except RecursionError:
            raise InvalidArgumentError("chat: a message or tool is nested too deeply") from None

    def ids_of(self, encoded: list[int], rendered: str) -> list[int]:
        """Return the token ids of a rendered chat from what `tokenizer` made of it.

        Raises `InvalidArgumentError` if the vocabulary spells a special token's text by it alone.
        """
        ids = [self._ids.get(token_id, token_id) for token_id in encoded]
        made, allowed = Counter(ids), self._found(rendered)
        for token_id, text in self._texts.items():
            if text != self._unknown and made[token_id] > allowed[text]:
                raise InvalidArgumentError(
                    f"chat: {text!r} is a special token of the target, and cannot be encoded as "
                    "text; leave it out"
                )
        return ids

    def _found(self, text: str) -> Counter[str]:
        """Count the special tokens in a text."""
        if not text:
            return Counter()
        readable = text.encode(errors="replace").decode()  # without unpaired surrogates
        (encoding,) = self._search.encode_batch_fast([readable])  # others run meanwhile
        return Counter(self._sought[i].content for i in encoding.ids if i in self._sought)

    def _shown(self, text: str, whole: Collection[str]) -> str:
        """Return a client's text with stand-ins in what it has of special tokens.

        That is whole ones, and at its edges parts, which the template may join with more.
        """
        for token in whole:
            if token in text:
                text = text.replace(token, token.translate(self._table))
        core = text.strip()
        if core in self._joined:
            return text.translate(self._table)
        lengths = range(1, min(self._longest, len(core)))
        head = max((k for k in lengths if core[:k] in self._endings), default=0)
        tail = max((k for k in lengths if core[-k:] in self._beginnings), default=0)
        if not head and not tail:
            return text
        start = text.find(core) + head
        end = max(start, text.find(core) + len(core) - tail)
        edges = text[:start].translate(self._table), text[end:].translate(self._table)
        return text[start:end].join(edges)


def _in_words(character: str) -> bool:
    """True if templates compare it: roles and types are words, which no special token is."""
    return character.isalnum() or character.isspace() or character in "_-"
