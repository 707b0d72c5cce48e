"""Prompts of absurd size are refused before they are read: to tokenize 24 MB takes minutes and GB.

What is not absurd is tokenized as a whole and counted exactly, by whoever calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flyspec.errors import InvalidArgumentError

ABSURD = 4
"""Contexts' worth of tokens. Pieces count a little differently than the whole, and a chat template
may leave something out; neither by so much."""
PIECE_CHARACTERS = 1 << 14


def check_size(texts: Sequence[str], num_tokens: Callable[[str], int], context_length: int) -> None:
    """Refuse texts that are far too long together, having tokenized no more than shows it.

    Raises `InvalidArgumentError`.
    """
    limit = ABSURD * context_length
    characters = sum(map(len, texts))
    if characters <= limit:
        return
    found = seen = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            found += num_tokens(piece)
            seen += len(piece)
            if found > limit:
                raise InvalidArgumentError(
                    f"prompt: {characters} characters, the first {seen} of them over {limit} "
                    f"tokens; the model's context is {context_length}; shorten the prompt"
                )


def check_count(what: str, count: int, context_length: int) -> None:
    """Refuse more token ids, or chat messages, than the context has tokens."""
    if count > context_length:
        raise InvalidArgumentError(
            f"prompt: {count} {what} leave no room in the model's context of {context_length}; "
            "shorten the prompt"
        )
