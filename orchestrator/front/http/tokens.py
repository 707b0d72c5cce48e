"""`/tokenize` and `/detokenize`, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo
from orchestrator.front.http.bodies import DetokenizeBody, TokenizeBody
from orchestrator.front.http.logprobs import name_of
from orchestrator.front.http.options import chat_of
from orchestrator.generation.prompt import check_ids, encode_text


def tokenize(body: TokenizeBody, tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """Raises `InvalidArgumentError`."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgumentError("prompt: give either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        text, known = body.prompt, (tokenizer, model)
        token_ids = encode_text(text, *known, special) if text else tokenizer.encode("", special)
    elif body.add_special_tokens:
        raise InvalidArgumentError(
            "add_special_tokens: only with prompt; a chat template writes its own"
        )
    else:
        token_ids = tokenizer.encode_chat(chat_of(body, not tokenizer.chat_templates.reads_parts))
    names = map(name_of, map(tokenizer.bytes_of, token_ids))
    return {
        "count": len(token_ids),
        "max_model_len": model.context_length,
        "tokens": token_ids,
        "token_strs": list(names) if body.return_token_strs else None,
    }


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """Raises `InvalidArgumentError`."""
    check_ids("tokens", body.tokens, model)
    return {"prompt": tokenizer.decode(body.tokens)}
