"""Function calls in a model's text: JSON between `<tool_call>` tags, as Hermes and Qwen write them.

Other formats stay text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from flyspec.tokenizer import Tokenizer
from orchestrator.front.http.bodies import CallingBody
from orchestrator.generation.phases import TOOL_CALL_TAGS

OPEN, CLOSE = TOOL_CALL_TAGS


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolCallParser:
    """Separates a growing text into text and calls.

    Text that may be the beginning of a tag is held back; a call comes once it is complete. What
    turns out to be no call is text. White space around calls is dropped.
    """

    def __init__(self) -> None:
        self._held, self._space, self._called = "", "", False

    def push(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while self._held:
            before, tag, after = self._held.partition(OPEN)
            if not tag:
                hold = _tag_begun(before)
                self._held = before[len(before) - hold :]
                yield from self._spaced(before[: len(before) - hold])
                return
            yield from self._spaced(before)
            inside, end, rest = after.partition(CLOSE)
            self._held = OPEN + after
            if not end:
                return
            self._held = rest
            if call := _read(inside):
                self._space, self._called = "", True
                yield call
            else:
                yield from self._spaced(OPEN + inside + CLOSE)

    def end(self, stop: str | int | None = None) -> Iterator[str | ToolCall]:
        """Yield what is left when nothing more comes, because of that stop string."""
        if stop == CLOSE:
            yield from self.push(CLOSE)
        left, self._held = self._space + self._held, ""
        if left.strip() if self._called else left:
            yield left

    def _spaced(self, text: str) -> Iterator[str]:
        """Yield text, without space that a call may follow or that follows a call."""
        text = text.lstrip() if self._called else self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._called = False
            yield shown


def _parses(body: CallingBody, tokenizer: Tokenizer) -> bool:
    """Return whether the chat template shows tools and has calls tagged."""
    return body.shows_tools and tokenizer.chat_templates.tags_tool_calls


def parser_for(body: CallingBody, tokenizer: Tokenizer) -> ToolCallParser | None:
    """Return a parser for the output, if it may have calls that can be told from text."""
    return ToolCallParser() if _parses(body, tokenizer) else None


def stops_of(body: CallingBody, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return our own stop strings, which keep calls from being parallel if they must not be."""
    return (CLOSE,) if _parses(body, tokenizer) and not body.parallel_tool_calls else ()


def asked_stop(found: str | int | None, own: Collection[str]) -> str | int | None:
    """Return the stop string or token that was found, unless it is one of our own."""
    return None if found in own else found


def _tag_begun(text: str) -> int:
    """Return how many of the last characters may begin a tag."""
    most = min(len(text), len(OPEN) - 1)
    return next((n for n in range(most, 0, -1) if OPEN.startswith(text[-n:])), 0)


def _read(inside: str) -> ToolCall | None:
    try:
        found: Any = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments)
