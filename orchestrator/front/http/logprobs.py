"""Log-probabilities in OpenAI's two shapes: chat's `content` and the lists of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import Chunk
from flyspec.values.tokens import TokenLogprobs, json_logprob


def chat_logprobs(chunks: Sequence[Chunk], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """Return `content`: token, bytes, logprob, and the `num_top` most likely tokens."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token_id)
        return {
            "token": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": json_logprob(logprob),
        }

    return {
        "content": [
            {
                **entry(token_id, found.logprob),
                "top_logprobs": [
                    entry(*pair)
                    for pair in zip(found.top_token_ids, found.top_logprobs, strict=True)
                ][:num_top],
            }
            for chunk in chunks
            for token_id, found in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    texts: Sequence[str],
    offset: int,
    tokenizer: Tokenizer,
    num_top: int,
) -> dict[str, Any]:
    """Return lists with an entry per token; `found` is None for a prompt's first token.

    `texts` are the parts of the text that the tokens completed, `offset` the characters before.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [name_of(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [entry and json_logprob(entry.logprob) for entry in found],
        "top_logprobs": [entry and _top(entry, tokenizer, num_top) for entry in found],
        "text_offset": offsets,
    }


def _top(entry: TokenLogprobs, tokenizer: Tokenizer, num_top: int) -> dict[str, float]:
    pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
    return {name_of(token_id, tokenizer): json_logprob(logprob) for token_id, logprob in pairs}


def name_of(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text, or as OpenAI's `bytes:\\xe2\\x82` if it is no whole characters."""
    data = tokenizer.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
