"""Functions that the model may call, and its earlier calls, as chat templates have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.json_text import read_json

Tool = Mapping[str, Any]


def checked_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return chat completions' tools. Raises `InvalidArgumentError` for what is no function."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        _check_type(where, tool)
        if not isinstance(function := tool.get("function"), Mapping):
            raise InvalidArgumentError(f"{where}.function: must be an object with a name")
        _check_name(f"{where}.function", function)
    return tuple(tools)


def nested_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return `/v1/responses`' tools as chat completions have them; raises likewise."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        _check_type(where, tool)
        _check_name(where, tool)
    return tuple(
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
    )


def call_of_template(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call's function: templates write arguments as JSON, so they expect an object."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a call that the model broke stays text
            arguments = read_json((arguments or "{}").encode(), "arguments")
    return {"name": name, "arguments": arguments}


def _check_type(where: str, tool: Tool) -> None:
    if tool.get("type") != "function":
        raise InvalidArgumentError(
            f"{where}.type: {tool.get('type')!r:.100}: only functions are served"
        )


def _check_name(where: str, function: Tool) -> None:
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidArgumentError(f"{where}.name: must be the function's name")
