"""Log-probabilities in OpenAI's two shapes: chat's `content` and the lists of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    texts: Sequence[str],
    offset: int,
    bytes_of: Callable[[int], bytes],
) -> dict[str, Any]:
    """Return lists with an entry per token; `found` is None for a prompt's first token.

    `texts` are the parts of the text that the tokens completed, `offset` the characters before.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [name_of(bytes_of(token_id)) for token_id in token_ids],
        "token_logprobs": [entry and json_logprob(entry.logprob) for entry in found],
        "top_logprobs": [entry and _top(entry) for entry in found],
        "text_offset": offsets,
    }


def _top(entry: TokenLogprobs) -> dict[str, float]:
    pairs = zip(entry.top_tokens, entry.top_logprobs, strict=True)
    return {name_of(token): json_logprob(logprob) for token, logprob in pairs}


def name_of(token: bytes) -> str:
    """Return a token as text, or as OpenAI's `bytes:\\xe2\\x82` if it is no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
