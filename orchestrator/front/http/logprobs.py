"""Log-probabilities in OpenAI's two shapes: chat's `content` and the lists of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import Chunk
from flyspec.values.tokens import TokenLogprobs, json_logprob


def chat_logprobs(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return `content`: an entry per token, with the most likely tokens."""
    content = [
        entry.document(token_id)
        for chunk in chunks
        for token_id, entry in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Offsets of tokens in a text, in characters, however the text is cut into parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer, self._at = tokenizer.detokenizer(), 0

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._at)
            self._at += len(self._detokenizer.push(token_id))
        return found


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    bytes_of: Callable[[int], bytes],
) -> dict[str, Any]:
    """Return lists with an entry per token; `found` is None for a prompt's first token."""
    return {
        "tokens": [name_of(bytes_of(token_id)) for token_id in token_ids],
        "token_logprobs": [entry and json_logprob(entry.logprob) for entry in found],
        "top_logprobs": [entry and _top(entry) for entry in found],
        "text_offset": list(offsets),
    }


def _top(entry: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens, and the token itself."""
    pairs = [(entry.token, entry.logprob), *zip(entry.top_tokens, entry.top_logprobs, strict=True)]
    return {name_of(token): json_logprob(logprob) for token, logprob in pairs}


def name_of(token: bytes) -> str:
    """Return a token as text, or as OpenAI's `bytes:\\xe2\\x82` if it is no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
