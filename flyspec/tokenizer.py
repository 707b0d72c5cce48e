"""The target's tokenizer without the target: encoding, streaming decoding, fingerprint. No torch.

Built on the `tokenizers` library; the bundle comes from `VerifyService.GetTokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from flyspec.errors import InvalidArgumentError
from flyspec.values.admin import TokenizerBundle


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level tokenizers write bytes as: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    """Names of the decoders in `tokenizer.json`, those inside a sequence included."""
    if not decoder:
        return set()
    inner = [_decoder_types(d) for d in decoder.get("decoders", [])]
    return {decoder["type"]}.union(*inner)


def id_to_bytes(tokenizer: RustTokenizer) -> dict[int, bytes]:
    """The bytes that each id stands for; special tokens stand for their own name in UTF-8."""
    spec = json.loads(tokenizer.to_str())
    byte_level = "ByteLevel" in _decoder_types(spec.get("decoder"))
    alphabet = _byte_level_alphabet()
    added = {token["id"] for token in spec.get("added_tokens", [])}

    def to_bytes(token: str, token_id: int) -> bytes:
        if token_id in added:
            return token.encode()
        if byte_level and all(c in alphabet for c in token):
            return bytes(alphabet[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return {i: to_bytes(token, i) for token, i in tokenizer.get_vocab(True).items()}


def fingerprint(tokenizer: RustTokenizer, pad_token_id: int | None = None) -> str:
    """Hash of the id-to-bytes map, the padding id left out: equal when ids can be exchanged."""
    return next(fingerprints(id_to_bytes(tokenizer), [pad_token_id]))


def fingerprints(table: Mapping[int, bytes], pad_token_ids: Iterable[int | None]) -> Iterator[str]:
    """The fingerprint of an id-to-bytes map with each of these as the padding id; None: no id."""
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
    """Encodes prompts and decodes outputs with the target's tokenizer."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._tokenizer = RustTokenizer.from_buffer(bundle.tokenizer_json)
        self._bundle = bundle
        self.eos_token_ids = frozenset(bundle.eos_token_ids)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.filters["tojson"] = lambda value, **kw: json.dumps(
            value, ensure_ascii=False, **kw
        )
        self._template = None
        self._no_template = "the target has no chat template"
        if bundle.chat_template:
            try:
                self._template = environment.from_string(bundle.chat_template)
            except TemplateError as error:  # such as a tag that only transformers knows
                self._no_template = f"the target's chat template cannot be read ({error})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens as the tokenizer's own post-processor adds them.

        Raises `InvalidArgumentError` for a text with half of a surrogate pair, which has no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"text: character {error.start} is half of a surrogate pair; send whole characters"
            ) from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a chat of (role, content), ready for the assistant to answer."""
        if self._template is None:
            raise InvalidArgumentError(f"chat: {self._no_template}; send text or token_ids instead")
        try:
            text = self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                bos_token=self._token(self._bundle.bos_token_id),
                eos_token=self._token(next(iter(self._bundle.eos_token_ids), None)),
            )
        except TemplateError as error:
            raise InvalidArgumentError(
                f"chat.messages: the target's chat template refuses them: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._tokenizer.id_to_token(token_id) or "")

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming decoder."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Decodes a growing output; never hands out half a character.

    Rests on `tokenizers.decoders.DecodeStream`, which holds text back while it ends in an
    incomplete UTF-8 sequence.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def copy(self) -> Detokenizer:
        """A decoder that goes on from here on its own."""
        other = Detokenizer.__new__(Detokenizer)
        other._tokenizer = self._tokenizer
        other._stream = copy(self._stream)
        other._pending = list(self._pending)
        return other

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers has no error of its own
            return self._restart(token_id)
        if text is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return str(text)

    def _restart(self, token_id: int) -> str:
        """The text up to this token, by a fresh stream.

        With byte fallback, bytes that are no UTF-8 change how a byte token before them reads, which
        the stream does not survive.
        """
        pending, self._pending = [*self._pending, token_id], []
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stream.step(self._tokenizer, token_id)  # what follows a token may depend on it
        return self._tokenizer.decode(pending, skip_special_tokens=True)

    def flush(self) -> str:
        """What an output that ends in half a character still holds, as replacement characters."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=True) if pending else ""


def _raise_template_error(message: str) -> None:
    """What chat templates call to refuse a chat."""
    raise TemplateError(message)
