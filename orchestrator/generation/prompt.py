"""Encodes and checks prompts: at least one token, and room in the context for one more.

Absurdly long prompts are refused before tokenizing: 24 MB would take minutes and gigabytes. Others
are tokenized as a whole and counted exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from flyspec.concurrency import LONG
from flyspec.errors import ContextLengthError, InvalidArgumentError
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo
from flyspec.values.chat import Chat
from flyspec.values.requests import Prompt

ABSURD = 4
"""Multiple of the context length from which a prompt is absurdly long. Tokenizing in pieces gives a
slightly different count, and a chat template may drop text; neither comes near this factor."""
PIECE_CHARACTERS = 1 << 14


def is_long(prompt: Prompt, prediction: str | Sequence[int] = "") -> bool:
    """True if these are to be encoded in turn."""
    if len(prediction) > LONG:
        return True
    if isinstance(prompt, Chat):
        lengths = accumulate(1 + len(text) for text in prompt.texts)
        return any(length > LONG for length in lengths)
    return len(prompt) > LONG


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, model: ModelInfo, field: str = "prompt"
) -> list[int]:
    """Return the prompt's token ids. Raises `InvalidArgumentError`, with `field` in its message."""
    context_length = model.context_length
    match prompt:
        case str():
            token_ids = encode_text(prompt, tokenizer, model, field=field)
        case Chat(messages):
            if not messages:
                raise InvalidArgumentError("chat.messages: is empty; send at least one")
            _check_count(field, "messages", len(messages), context_length)
            _check_size(list(prompt.texts), tokenizer, context_length, field)
            token_ids = tokenizer.encode_chat(prompt)
        case _:
            _check_count(field, "tokens", len(prompt), context_length)
            token_ids = list(prompt)
    if not token_ids:
        raise InvalidArgumentError(f"{field}: no token ids; send at least one")
    check_ids(field, token_ids, model)
    if len(token_ids) >= context_length:
        raise _too_long(field, f"it has {len(token_ids)}", context_length)
    return token_ids


def encode_text(
    text: str,
    tokenizer: Tokenizer,
    model: ModelInfo,
    add_special_tokens: bool = True,
    field: str = "prompt",
) -> list[int]:
    """Encode a text, unless it is empty or absurdly long. Raises `InvalidArgumentError`."""
    if not text:
        raise InvalidArgumentError(f"{field}: text is empty; send at least one character")
    _check_size([text], tokenizer, model.context_length, field)
    return tokenizer.encode(text, add_special_tokens)


def encode_prediction(
    prediction: str | Sequence[int], tokenizer: Tokenizer, model: ModelInfo
) -> Sequence[int]:
    """Return the tokens of a predicted output, as many as an output can have."""
    most = model.context_length
    if not isinstance(prediction, str):
        check_ids("prediction_token_ids", prediction, model)
        return prediction[:most]
    if not prediction:
        return ()
    _check_size([prediction], tokenizer, most, "prediction")
    return tokenizer.encode(prediction, add_special_tokens=False)[:most]


def check_ids(field: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    """Raise `InvalidArgumentError` if any token id is outside the model's vocabulary."""
    for token_id in (max(token_ids, default=0), min(token_ids, default=0)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgumentError(
                f"{field}: token id {token_id} is out of range; {model.name} has ids "
                f"0 to {model.vocab_size - 1}"
            )


def _check_size(
    texts: Sequence[str], tokenizer: Tokenizer, context_length: int, field: str
) -> None:
    """Refuse texts that are far too long in total, tokenizing only as much as needed to tell."""
    limit = ABSURD * context_length
    characters = sum(map(len, texts))
    if characters <= limit:
        return
    found = seen = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            found += len(tokenizer.encode(piece, add_special_tokens=False))
            seen += len(piece)
            if found > limit:
                had = f"of its {characters} characters, the first {seen} have more than {limit}"
                raise _too_long(field, had, context_length)


def _check_count(field: str, what: str, count: int, context_length: int) -> None:
    """Refuse more token ids or chat messages than the context has tokens."""
    if count > context_length:
        raise _too_long(field, f"it has {count} {what}", context_length)


def _too_long(field: str, had: str, context_length: int) -> ContextLengthError:
    """Clients know by the wording, OpenAI's, that they have to shorten a conversation."""
    return ContextLengthError(
        f"{field}: this model's maximum context length is {context_length} tokens, but {had}; "
        "shorten it"
    )
