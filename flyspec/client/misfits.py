"""Names the value of a request that cannot be sent, and says what it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from flyspec import wire
from flyspec.client.requests import GenerateKeywords, shown
from flyspec.errors import InvalidArgumentError
from flyspec.flags import UINT32, flags_of
from flyspec.ranges import Range
from flyspec.rules import PARAMETERS, Rule
from flyspec.v1 import generation_pb2
from flyspec.values.chat import Chat
from flyspec.values.phases import Phase
from flyspec.values.requests import GenerateOptions, GenerationRequest, ScoreRequest
from flyspec.values.tokens import SamplingParams

UNSENDABLE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Raised by encoding a request with values that its fields cannot hold."""

_EMPTY: Mapping[type, Any] = {
    GenerationRequest: GenerationRequest(""),
    ScoreRequest: ScoreRequest(""),
    GenerateOptions: GenerateOptions(),
    SamplingParams: SamplingParams(),
    Rule: Rule(""),
    Phase: Phase(),
    Chat: Chat(()),
}
"""Requests, and parts of them, that can be sent."""
_WORDS = {
    NoneType: ("None", "None"),
    bool: ("True or False", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}
"""Types of one value, and of many."""


def misfit(request: GenerationRequest | ScoreRequest) -> str | None:
    """Describe the first value of a request that cannot be sent; None if each can, alone."""
    for given in _values(request, "", lambda whole: whole):
        if problem := _problem(given.alone(given.value)):
            return _described(given, problem)
    return None


class _Given(NamedTuple):
    """A value in a request, its name in the server's messages, and what is known of it.

    `range` is the one declared for integers. `alone` makes a request with a value only here.
    """

    name: str
    value: Any
    hint: Any
    range: Range | None
    alone: Callable[[Any], Any]


def _values(part: Any, within: str, whole: Callable[[Any], Any]) -> Iterator[_Given]:
    """Yield all values in a part of a request; `whole` makes a request with only such a part."""
    cls = type(part)
    hints = get_type_hints(cls)
    if cls in (GenerateOptions, SamplingParams):
        hints |= get_type_hints(GenerateKeywords)
    for name in (field.name for field in fields(cls)):
        value = getattr(part, name)

        def alone(value: Any, name: str = name) -> Any:
            return whole(replace(_EMPTY[cls], **{name: value}))

        if type(value) in _EMPTY:
            inside = within if cls is Phase else ""
            yield from _values(value, "" if name == "options" else f"{inside}{name}.", alone)
            continue
        if name == "phases" and isinstance(value, list | tuple) and {Phase} == {*map(type, value)}:
            for index, phase in enumerate(value):
                inside = f"speculation.phases[{index}]."
                yield from _values(phase, inside, partial(_in_list, alone))
            continue
        path = within + name
        if cls is GenerateOptions and name in generation_pb2.Speculation.DESCRIPTOR.fields_by_name:
            path = f"speculation.{name}"
        yield _Given(path, value, hints[name], _range(cls, name), alone)


def _in_list(alone: Callable[[Any], Any], item: Any) -> Any:
    return alone([item])


def _range(cls: type, name: str) -> Range | None:
    ranges: list[Range | None] = []
    if cls is Rule and name in PARAMETERS:
        ranges += PARAMETERS[name].ranges.values()
    elif name in (flags := {**flags_of(GenerateOptions), **flags_of(cls)}):
        ranges.append(flags[name][1].range)
    return next((found for found in ranges if found and found.integers), None)


def _problem(request: Any) -> Exception | None:
    try:
        wire.encode(request)
    except UNSENDABLE as error:
        return error
    return None


def _described(given: _Given, problem: Exception) -> str:
    """Say what a value must be, or the first item of a sequence that cannot be sent."""
    name, value, hint, range_, alone = given
    if (items := _item(hint)) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if found := _problem(alone([item])):
                if get_origin(items) is not tuple:  # pairs may have been a mapping
                    name = f"{name}[{index}]"
                value, hint, problem = item, items, found
                break
    if isinstance(problem, UnicodeError):
        return f"{name}: {problem}"
    if isinstance(value, tuple) and value and type(value[0]) is int and value[0] not in UINT32:
        return f"{name}: token id {value[0]} is out of range; ids are 0 to {UINT32.high}"
    message = isinstance(value, Mapping) and name.startswith("prompt.messages[")
    if message and not isinstance(value.get("role", ""), str):
        name, value, hint = f"{name}.role", value["role"], str
    if isinstance(value, int) and int in (hint, *get_args(hint)):
        try:
            (range_ or UINT32).check(name, value)
        except InvalidArgumentError as error:
            return str(error)
    return f"{name}: must be {_words(hint)}, got {shown(value)}"


def _item(hint: Any) -> Any:
    """Return the type of the items, if a value of this type may be a sequence."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) in (Sequence, tuple):
            return get_args(kind)[0]
    return None


def _words(hint: Any, many: bool = False) -> str:
    """Describe a type in English, as that of one value or of many."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        *first, last = (_words(part, many) for part in parts)
        return f"{', '.join(first)} or {last}"
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind is Mapping:
        if parts == (str, Any):
            return "JSON objects" if many else "a JSON object"
        return f"a mapping of {_words(parts[0], True)} to {_words(parts[1], True)}"
    if kind is tuple and Ellipsis not in parts:
        return f"pairs of {' and '.join(map(_words, parts))}"
    if kind in (Sequence, tuple):
        return f"a sequence of {_words(parts[0], True)}"
    own = f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"
    return _WORDS.get(hint, (own, f"{hint.__name__}s"))[many]
