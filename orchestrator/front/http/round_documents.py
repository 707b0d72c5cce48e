"""Rounds in replies: as `generate --json` prints them, with the tokens' texts beside their ids."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_jsonable_python

from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import RoundRecord
from orchestrator.front.http.logprobs import name_of


def round_document(record: RoundRecord, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a round for JSON; a number without a value there, such as infinity, is null."""

    def text_of(token_id: int | None) -> str | None:
        return None if token_id is None else name_of(tokenizer.bytes_of(token_id))

    document: dict[str, Any] = to_jsonable_python(record.document(), inf_nan_mode="null")
    document["draft_token_texts"] = [text_of(token_id) for token_id in record.draft_token_ids]
    document["next_token_text"] = text_of(record.next_token_id)
    for part in (*document["decisions"], *filter(None, [document["open_window"]])):
        part["target_token_text"] = text_of(part["target_token_id"])
    return document
