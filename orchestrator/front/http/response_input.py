"""The chat that the input of `/v1/responses` stands for."""

from __future__ import annotations

from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.values.chat import Chat
from orchestrator.front.http.bodies import ResponsesBody
from orchestrator.front.http.options import texts_of
from orchestrator.front.http.tools import call_of_template, nested_tools

Item = dict[str, Any]


def chat_of_items(body: ResponsesBody) -> Chat:
    """Return the chat that `instructions` and `input` stand for. Raises `InvalidArgumentError`."""
    given, tools = body.input, nested_tools(body.tools or ())
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise InvalidArgumentError("input: is empty; give at least one item")
    messages: list[Item] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(items):
        _add_item(messages, f"input[{index}]", item)
    return Chat(messages, tools=tools if body.shows_tools else ())


def _add_item(messages: list[Item], where: str, item: Item) -> None:
    """Append an item's message; a call belongs to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = _string(where, "role", item)
        text = _text(f"{where}.content", item.get("content"))
        messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        name, arguments = _string(where, "name", item), _string(where, "arguments", item)
        function = call_of_template(name, arguments)
        call = {"id": _string(where, "call_id", item), "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text, call_id = (
            _text(f"{where}.output", item.get("output")),
            _string(where, "call_id", item),
        )
        messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
    else:
        raise InvalidArgumentError(
            f"{where}.type: {kind!r:.100}: only message, function_call and function_call_output "
            "are served"
        )


def _string(where: str, name: str, item: Item) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidArgumentError(
            f"{where}.{name}: {'must be a string' if name in item else 'is missing'}"
        )
    return value


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgumentError(f"{where}: must be a text, or a list of parts of text")
    return "\n".join(texts_of(where, content))
