"""Chats as messages: what a chat template may read beyond role and text is JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.json_text import read_json
from flyspec.v1 import generation_pb2
from flyspec.values.chat import Chat, Message


def write(chat: Chat) -> Mapping[str, Any]:
    return {
        "messages": [_write_message(message) for message in chat.messages],
        "tools_json": json.dumps(chat.tools) if chat.tools else "",
        "documents_json": json.dumps(chat.documents) if chat.documents else "",
        "template_kwargs_json": json.dumps(chat.template_kwargs) if chat.template_kwargs else "",
        "continue_final_message": chat.continue_final_message,
        "omit_generation_prompt": not chat.add_generation_prompt,
    }


def read(message: generation_pb2.ChatPrompt) -> Chat:
    """Raises `InvalidArgumentError` for what is not JSON of the right kind."""
    return Chat(
        tuple(_read_message(index, turn) for index, turn in enumerate(message.messages)),
        tools=_objects("chat.tools_json", message.tools_json),
        documents=_objects("chat.documents_json", message.documents_json),
        template_kwargs=_object("chat.template_kwargs_json", message.template_kwargs_json),
        add_generation_prompt=not message.omit_generation_prompt,
        continue_final_message=message.continue_final_message,
    )


def _write_message(message: Message) -> Mapping[str, Any]:
    """An empty `content` goes into the JSON, to be told from a missing one."""
    role, content = message.get("role", ""), message.get("content")
    plain = content if isinstance(content, str) else ""
    covered = {"role", "content"} if plain else {"role"}
    rest = {name: value for name, value in message.items() if name not in covered}
    fields_json = "" if rest == {"content": ""} or (not rest and plain) else json.dumps(rest)
    return {"role": role, "content": plain, "fields_json": fields_json}


def _read_message(index: int, turn: generation_pb2.ChatMessage) -> Message:
    read: dict[str, Any] = {"role": turn.role}
    if turn.content or not turn.fields_json:
        read["content"] = turn.content
    fields = _object(f"chat.messages[{index}].fields_json", turn.fields_json)
    if repeated := read.keys() & fields.keys():
        raise InvalidArgumentError(
            f"chat.messages[{index}].fields_json: {', '.join(sorted(repeated))} given twice"
        )
    return read | fields


def _object(where: str, text: str) -> dict[str, Any]:
    value = _json(where, text) if text else {}
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where}: must be a JSON object")
    return value


def _objects(where: str, text: str) -> tuple[dict[str, Any], ...]:
    value = _json(where, text) if text else []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidArgumentError(f"{where}: must be a JSON array of objects")
    return tuple(value)


def _json(where: str, text: str) -> Any:
    try:
        return read_json(text.encode(), where)
    except (ValueError, RecursionError) as error:  # the latter for thousands of brackets
        raise InvalidArgumentError(f"{where}: not valid JSON: {error}") from None
