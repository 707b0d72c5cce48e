"""Renders chats with the target's chat templates, as transformers' `apply_chat_template` does.

Templates come with a model, so they run in jinja's sandbox and see plain JSON values only.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flyspec.errors import InvalidArgumentError
from flyspec.values.chat import Chat

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names in a list of templates; the second is for chats with tools."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first or second."""
_PART = re.compile(r"""\.type\b|\[['"]type['"]\]""")
_END = "|END-OF-THE-FINAL-MESSAGE|"


class ChatTemplates:
    """The chat templates of a model by name, and its special tokens, such as `bos_token`."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, Any] = {}

    def render(self, chat: Chat) -> str:
        """Return the chat's text. Raises `InvalidArgumentError`, naming what to change."""
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidArgumentError(
                "chat.continue_final_message: also set add_generation_prompt to false; a message "
                "is continued or a new one begun"
            )
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in chat.template_kwargs:
                raise InvalidArgumentError(
                    f"chat.template_kwargs: {name} is a field of the chat; give it there"
                )
        template = self._template(TOOL_USE if chat.tools else DEFAULT)
        messages = [_of_template(message) for message in chat.messages]
        if chat.continue_final_message:
            _mark_end(messages)
        try:
            text: str = template.render(
                **{
                    **self._special_tokens,
                    **chat.template_kwargs,
                    "messages": messages,
                    "tools": list(chat.tools) or None,
                    "documents": list(chat.documents) or None,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except Exception as error:  # a template can raise anything, such as TypeError
            raise InvalidArgumentError(
                f"chat: refused by the target's chat template: {error}"
            ) from error
        return _cut_at_end(text) if chat.continue_final_message else text

    @property
    def reads_parts(self) -> bool:
        """True if a template tells a list of text parts from text, by their type."""
        return any(_PART.search(source) for source in self._sources.values())

    @property
    def tags_tool_calls(self) -> bool:
        """True if a template has the model put function calls in `<tool_call>` tags."""
        return any("<tool_call>" in source for source in self._sources.values())

    def _template(self, name: str) -> Any:
        sources = self._sources
        name = name if name in sources else DEFAULT
        if name not in sources:
            known = ", ".join(sorted(sources))
            reason = f"chat templates {known}, but no default" if known else "no chat template"
            raise InvalidArgumentError(
                f"chat: the target has {reason}; send text or token_ids instead"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(sources[name])
            except TemplateError as error:  # such as a tag of a later version of transformers
                raise InvalidArgumentError(
                    f"chat: the target's chat template cannot be read ({error}); send text or "
                    "token_ids instead"
                ) from error
        return self._compiled[name]


def _of_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message, which templates expect without nulls, reasoning under each name.

    Text parts are copied, so that the end of the last one can be marked.
    """
    copied = {name: value for name, value in message.items() if value is not None}
    if isinstance(copied.get("content"), list):
        copied["content"] = [
            dict(part) if isinstance(part, dict) else part for part in copied["content"]
        ]
    reasoning = next((copied[name] for name in REASONING if name in copied), None)
    if reasoning is not None:
        copied = {"thinking": reasoning, **copied, "reasoning_content": reasoning}
    return copied


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append the mark to the final message's text. Raises `InvalidArgumentError` without one.

    The space behind it shows whether the template trims: then the text's own end is trimmed too.
    """
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _END + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END + " "
            return
    raise InvalidArgumentError("chat.continue_final_message: the final message has no text")


def _cut_at_end(text: str) -> str:
    before, mark, after = text.rpartition(_END)
    if not mark:
        raise InvalidArgumentError(
            "chat.continue_final_message: the target's chat template changes the final message's "
            "text, so it cannot be continued"
        )
    return before if after.startswith(" ") else before.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda format_: datetime.datetime.now().strftime(format_)
    environment.globals["namespace"] = _GuardedNamespace
    # jinja's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _GuardedNamespace(Namespace):
    """A namespace without underscored names, which lead out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
