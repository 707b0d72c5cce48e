"""Function calls in a model's text: JSON between `<tool_call>` tags, as Hermes and Qwen write them.

Other formats stay text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flyspec.tokenizer import Tokenizer
from orchestrator.front.http.bodies import CallingBody

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolCallParser:
    """Separates a growing text into text and calls.

    Text that may be the beginning of a tag is held back; a call comes once it is complete. What
    turns out to be no call is text. Unless calls may be `parallel`, what follows the first is cut.
    """

    def __init__(self, parallel: bool = True) -> None:
        self._held, self._parallel, self._ended = "", parallel, False

    def push(self, text: str) -> Iterator[str | ToolCall]:
        if self._ended:
            return
        self._held += text
        while self._held:
            before, tag, after = self._held.partition(OPEN)
            if not tag:
                hold = _tag_begun(before)
                self._held = before[len(before) - hold :]
                if shown := before[: len(before) - hold]:
                    yield shown
                return
            if before:
                yield before
            inside, end, rest = after.partition(CLOSE)
            self._held = OPEN + after
            if not end:
                return
            call = _read(inside)
            self._ended = call is not None and not self._parallel
            self._held = "" if self._ended else rest
            yield call or OPEN + inside + CLOSE

    def end(self) -> str:
        """Return the text that is left when nothing more comes."""
        held, self._held = self._held, ""
        return held


def parser_for(body: CallingBody, tokenizer: Tokenizer) -> ToolCallParser | None:
    """Return a parser for the output, if the chat template shows tools and has calls tagged."""
    if not (body.shown_tools and tokenizer.tags_tool_calls):
        return None
    return ToolCallParser(body.parallel_tool_calls)


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
