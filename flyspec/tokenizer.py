"""The target's tokenizer: encoding, streaming decoding, fingerprint. No torch.

Uses the `tokenizers` library; the bundle comes from `VerifyService.GetTokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from flyspec.chat_template import DEFAULT, ChatTemplates
from flyspec.errors import InvalidArgumentError
from flyspec.special_tokens import SpecialTokens
from flyspec.values.admin import TokenizerBundle
from flyspec.values.chat import Chat


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers; printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    """Return the types of the decoders in `tokenizer.json`, including those in sequences."""
    if not decoder:
        return set()
    inner = [_decoder_types(d) for d in decoder.get("decoders", [])]
    return {decoder["type"]}.union(*inner)


class TokenBytes:
    """The bytes that tokens stand for; for special tokens, their name in UTF-8."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        # What pickle keeps of a decoder is its JSON; that of the whole tokenizer is megabytes.
        decoder = tokenizer.decoder
        types = _decoder_types(json.loads(decoder.__getstate__()) if decoder else None)
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in types else {}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; those of an id without a token are empty."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._read(token, token_id)

    def all(self) -> dict[int, bytes]:
        """Return the bytes of each token by its id (half a second for a large vocabulary)."""
        return {i: self._read(token, i) for token, i in self._tokenizer.get_vocab(True).items()}

    def _read(self, token: str, token_id: int) -> bytes:
        alphabet = self._alphabet
        if token_id in self._added:
            return token.encode()
        if alphabet and all(c in alphabet for c in token):
            return bytes(alphabet[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def fingerprint(tokenizer: RustTokenizer, pad_token_id: int | None = None) -> str:
    """Hash the id-to-bytes map without the padding ID: equal if IDs are interchangeable."""
    return next(fingerprints(TokenBytes(tokenizer).all(), [pad_token_id]))


def fingerprints(table: Mapping[int, bytes], pad_token_ids: Iterable[int | None]) -> Iterator[str]:
    """Yield the fingerprint of an id-to-bytes map for each of these padding IDs (None: no ID)."""
    parts, spans, end = [], {}, 0
    for token_id, data in sorted(table.items()):
        part = f"{token_id}:{len(data)}:".encode() + data
        parts.append(part)
        spans[token_id] = (end, end := end + len(part))
    whole = memoryview(b"".join(parts))
    for pad_token_id in pad_token_ids:
        start, end = spans.get(pad_token_id, (0, 0)) if pad_token_id is not None else (0, 0)
        digest = hashlib.sha256(whole[:start])
        digest.update(whole[end:])
        yield digest.hexdigest()[:32]


class Tokenizer:
    """Encodes prompts and decodes outputs with the target's tokenizer.

    With `allow_special_tokens`, the text of a special token in a chat's messages is that token.
    """

    def __init__(self, bundle: TokenizerBundle, allow_special_tokens: bool = False) -> None:
        self._tokenizer = RustTokenizer.from_buffer(bundle.tokenizer_json)
        control = () if allow_special_tokens else bundle.control_token_ids
        self._special = SpecialTokens(self._tokenizer, control)
        self.eos_token_ids = frozenset(bundle.eos_token_ids)
        self.control_token_ids = frozenset(bundle.control_token_ids)
        templates = dict(bundle.named_chat_templates)
        if bundle.chat_template:
            templates[DEFAULT] = bundle.chat_template
        self.chat_templates = ChatTemplates(templates, dict(bundle.special_tokens))
        self._bytes = TokenBytes(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; the tokenizer's post-processor adds special tokens.

        Raises `InvalidArgumentError` for an unpaired surrogate, which has no UTF-8.
        """
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_chat(self, chat: Chat) -> list[int]:
        """Encode a chat as the target's chat template renders it. Raises `InvalidArgumentError`."""
        shown = self._special.as_text(chat)
        text = self.chat_templates.render(shown)
        if shown is chat:
            return self.encode(text, add_special_tokens=False)
        encoded = _encode(self._special.tokenizer, text, add_special_tokens=False)
        return self._special.ids_of(encoded, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; those of an id without a token are empty."""
        return self._bytes.of(token_id)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)


def _encode(tokenizer: RustTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"text: character {error.start} is an unpaired surrogate; send whole characters"
        ) from None
    # Unlike `encode`, this lets other threads run meanwhile.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class Detokenizer:
    """Decodes a growing output, in whole characters.

    Uses `tokenizers.decoders.DecodeStream`, which holds back incomplete UTF-8 sequences.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def copy(self) -> Detokenizer:
        """Return an independent decoder in the same state."""
        other = Detokenizer.__new__(Detokenizer)
        other._tokenizer = self._tokenizer
        other._stream = copy(self._stream)
        other._pending = list(self._pending)
        return other

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, possibly none."""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises no specific error
            return self._restart(token_id)
        if text is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return str(text)

    def _restart(self, token_id: int) -> str:
        """Return the text up to this token, using a fresh stream.

        With byte fallback, invalid UTF-8 changes how earlier byte tokens decode, which the stream
        cannot handle.
        """
        pending, self._pending = [*self._pending, token_id], []
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stream.step(self._tokenizer, token_id)  # context for the tokens that follow
        return self._tokenizer.decode(pending, skip_special_tokens=True)

    def flush(self) -> str:
        """Return an incomplete last character, if any, as replacement characters."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=True) if pending else ""
