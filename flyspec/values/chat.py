"""A chat as a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Message = Mapping[str, Any]
"""`role`, `content` (text, or a list of parts) and whatever else the chat template reads, such as
`tool_calls`; JSON values."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a prompt, rendered by the target's chat template.

    `tools` (JSON schemas of functions) and `documents` are for templates that read them;
    `template_kwargs` are more of a template's variables, such as `enable_thinking`. By default the
    assistant's next message is begun; with `continue_final_message`, and without
    `add_generation_prompt`, the final one is continued.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_user(cls, content: str) -> Chat:
        return cls(({"role": "user", "content": content},))

    @property
    def texts(self) -> Iterator[str]:
        """All strings in the chat, names included."""
        return strings_in((self.messages, self.tools, self.documents, self.template_kwargs))

    def with_texts(self, change: Callable[[str], str]) -> Chat:
        """Return a copy with every string changed, names included."""
        names = ("messages", "tools", "documents", "template_kwargs")
        return replace(self, **{name: _changed(getattr(self, name), change) for name in names})


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, of whatever depth, names included."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, list | tuple):
            rest += item


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _changed(item, change) for name, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list | tuple) else value
