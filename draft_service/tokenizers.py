"""Targets' tokenizers that sessions can use besides the draft model's own. No torch."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterable

from draft_service.translation import Translator, Vocabulary
from flyspec.errors import (
    IncompatibleError,
    InvalidArgumentError,
    PrefixMismatchError,
    ResourceExhaustedError,
)
from flyspec.ranges import Range
from flyspec.tokenizer import fingerprints
from flyspec.values.admin import TokenizerBundle, TokenizerFacts

log = logging.getLogger(__name__)

MAX_KNOWN = 4
"""Maximum tokenizers kept; the least recently used is evicted."""
MAX_BYTES = 64 << 20
"""Maximum size of a `tokenizer.json`; today's largest are half as big."""
MAX_UPLOADS = 4
"""Maximum tokenizers being received at once, and as many being parsed."""
MAX_VOCAB_SIZE = 1 << 24
MAX_CONTROL_TOKENS = 1 << 16
MAX_PAD_CANDIDATES = 256
"""Maximum control tokens tried as the padding token, which a fingerprint leaves out."""


class Tokenizers:
    """Targets' tokenizers by fingerprint, ready to translate to and from the draft model's.

    `draft` is the draft model's own (None: no model), `draft_vocab_size` the number of rows of its
    output layer.
    """

    def __init__(self, draft: TokenizerBundle | None = None, draft_vocab_size: int = 0) -> None:
        self._bundle, self._draft_vocab_size = draft, draft_vocab_size
        self._draft: Vocabulary | None = None
        self._known: OrderedDict[str, Translator | None] = OrderedDict()
        self._uploads = 0
        self._builds: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the known tokenizers, least recently used first."""
        return tuple(self._known)

    def translator(self, fingerprint: str) -> Translator:
        """Return the translator for this tokenizer.

        Raises `PrefixMismatchError` if it is unknown: the service may have restarted or evicted it,
        and the client can send it again.
        """
        found = self._known.get(fingerprint)
        if found is None:
            raise PrefixMismatchError(
                f"open.tokenizer_fingerprint: {fingerprint!r} is unknown; send the tokenizer "
                "with AddTokenizer and open the session again"
            )
        self._known.move_to_end(fingerprint)
        return found

    async def receive(self, messages: AsyncIterable[TokenizerFacts | bytes]) -> None:
        """Receive a tokenizer in messages: facts, then pieces of `tokenizer.json`; register it.

        It replaces any with the same fingerprint. Raises `InvalidArgumentError` if messages are out
        of order or incomplete, or the tokenizer cannot be read, does not match its fingerprint or
        cannot be translated; `IncompatibleError` if the draft model's own cannot;
        `ResourceExhaustedError` if it is too large or too many are being received or parsed.
        """
        if self._uploads >= MAX_UPLOADS:
            raise _too_many()
        self._uploads += 1
        facts, tokenizer_json = None, bytearray()
        try:
            async for message in messages:
                if isinstance(message, TokenizerFacts) == (facts is not None):
                    raise InvalidArgumentError(
                        "AddTokenizerRequest.request: send facts first and once, then the chunks"
                    )
                if isinstance(message, TokenizerFacts):
                    facts = message
                    continue
                if len(tokenizer_json) + len(message) > MAX_BYTES:
                    raise ResourceExhaustedError(
                        f"tokenizer_json_chunk: more than {MAX_BYTES >> 20} MiB in all, which is "
                        "too large to translate; use a draft model with the target's tokenizer"
                    )
                tokenizer_json += message
        finally:
            self._uploads -= 1
        if facts is None or not tokenizer_json:
            raise InvalidArgumentError(
                "AddTokenizerRequest: the stream ended before facts and tokenizer.json were sent"
            )
        if len(self._builds) >= MAX_UPLOADS:
            raise _too_many()
        # A thread cannot be cancelled: it counts until it ends even if the caller gives up.
        build = asyncio.create_task(self._add(facts, bytes(tokenizer_json)))
        self._builds.add(build)
        build.add_done_callback(self._built)
        await asyncio.shield(build)

    def _built(self, build: asyncio.Task[None]) -> None:
        self._builds.discard(build)
        if not build.cancelled() and build.exception():
            log.info("tokenizer rejected: %s", build.exception())

    async def _add(self, facts: TokenizerFacts, tokenizer_json: bytes) -> None:
        async with self._one_at_a_time:
            translator = await asyncio.to_thread(self._build, facts, tokenizer_json)
            self._known[facts.fingerprint] = translator
            self._known.move_to_end(facts.fingerprint)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _build(self, facts: TokenizerFacts, tokenizer_json: bytes) -> Translator | None:
        """Return a tokenizer's translator; None without a model, where none is needed."""
        Range(1, MAX_VOCAB_SIZE).check("facts.vocab_size", facts.vocab_size)
        if len(facts.control_token_ids) + len(facts.eos_token_ids) > MAX_CONTROL_TOKENS:
            raise InvalidArgumentError(
                f"facts.control_token_ids and facts.eos_token_ids: at most {MAX_CONTROL_TOKENS} "
                f"together, got {len(facts.control_token_ids)} and {len(facts.eos_token_ids)}"
            )
        target = Vocabulary(
            tokenizer_json, facts.eos_token_ids, facts.control_token_ids, facts.vocab_size
        )
        _check_fingerprint(target, facts)
        if self._bundle is None:
            return None
        if self._draft is None:
            own = self._bundle
            try:
                self._draft = Vocabulary(
                    own.tokenizer_json,
                    own.eos_token_ids,
                    own.control_token_ids,
                    self._draft_vocab_size,
                )
            except InvalidArgumentError as error:
                raise IncompatibleError(f"the draft model's own tokenizer: {error}") from error
        return Translator(target, self._draft)


def _too_many() -> ResourceExhaustedError:
    return ResourceExhaustedError(f"{MAX_UPLOADS} tokenizers are already being added; retry later")


def _check_fingerprint(vocabulary: Vocabulary, facts: TokenizerFacts) -> None:
    """Raise `InvalidArgumentError` if a tokenizer does not match its facts' fingerprint.

    The fingerprint leaves out the padding token, which the facts do not name: one of the control
    tokens that are not EOS, or none.
    """
    table = vocabulary.all_bytes
    others = list({*facts.control_token_ids} - {*facts.eos_token_ids})
    others.sort(key=lambda i: (b"pad" not in table.get(i, b"").lower(), i))
    for found in fingerprints(table, [None, *others[:MAX_PAD_CANDIDATES]]):
        if found == facts.fingerprint:
            return
    raise InvalidArgumentError(
        f"facts.fingerprint: {facts.fingerprint!r} does not match the tokenizer.json sent with it; "
        "send both as returned by the target's GetTokenizer, and run the same release of both "
        "services"
    )
