"""Values to protobuf and back, by the names of their fields.

A value's field is the field of that name in its message. Where there is none, it is in a message
inside it that no field of the value is named after (`usage`), or it is a value whose own fields
stand in its owner's message, with a prefix (`budget`). Absent is None, or the default of a field
that is never None. What differs otherwise is said by `Exceptions`.

For each value class and message the two functions that one would write by hand are put together as
source, once, when they are first needed: nothing is looked up on the way of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from flyspec.errors import InvalidArgumentError

Encode = Callable[[Any], Mapping[str, Any]]
"""From a value to its message's fields, for the message's constructor; messages in it likewise."""
Decode = Callable[..., Any]


class Hook(NamedTuple):
    """A field with a form of its own: `write` gives `fields` of the message, `read` reads them."""

    fields: Collection[str]
    write: Callable[[Any], Mapping[str, Any]]
    read: Callable[[Any], Any]


class Exceptions(NamedTuple):
    """What names do not tell.

    `hooks` are by class and field. `local` fields do not travel; whoever reads a message may give
    them. `prefixes` are those of a value's fields where they stand in its owner's message. `around`
    has a class's own way to write and to read, around the one by name. `called` names messages in
    errors.
    """

    hooks: Mapping[tuple[type, str], Hook]
    local: Mapping[type, Collection[str]]
    prefixes: Mapping[type, str]
    around: Mapping[type, Callable[[Encode, Decode], tuple[Encode, Decode]]]
    called: Mapping[str, str]


class Field(NamedTuple):
    """A field of a value. `item` is what it is, or has many of; `none` whether it may be None."""

    name: str
    item: Any
    container: type | None
    none: bool
    default: Any

    @property
    def is_value(self) -> bool:
        """Whether it is, or has many of, what has fields itself."""
        return dataclasses.is_dataclass(self.item) or hasattr(self.item, "_fields")


def fields_of(cls: Any) -> Iterator[Field]:
    """The fields of a dataclass or named tuple."""
    hints = get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        names = {
            f.name: f.default_factory() if callable(f.default_factory) else f.default
            for f in dataclasses.fields(cls)
        }
    else:
        names = {name: cls._field_defaults.get(name, dataclasses.MISSING) for name in cls._fields}
    for name, default in names.items():
        hint = hints[name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        hint = next(kind for kind in kinds if kind is not NoneType)
        outer = get_origin(hint)
        container = None
        if outer in (tuple, Sequence):
            container = tuple if outer is tuple or default == () else list
            hint = get_args(hint)[0]
        yield Field(name, hint, container, NoneType in kinds, default)


class _Members(dict[int, Any]):
    """An enum's members by number; another number is an error that lists them."""

    def __init__(self, enum: type[IntEnum], where: str) -> None:
        super().__init__({int(member): member for member in enum})
        self._where, self._enum = where, enum

    def __missing__(self, number: int) -> Any:
        allowed = ", ".join(f"{m.name.lower()} ({int(m)})" for m in self._enum)
        raise InvalidArgumentError(f"{self._where}: {number} is not one of {allowed}")


class Codec:
    """Writes values of any class to messages, and reads them."""

    def __init__(self, exceptions: Exceptions) -> None:
        self.exceptions = exceptions
        self._pairs: dict[tuple[type, str], tuple[Encode, Decode]] = {}

    def pair(self, cls: type, descriptor: Descriptor) -> tuple[Encode, Decode]:
        """How a value of a class is written to such a message, and read from it.

        Raises TypeError if one of them has a field that the other lacks.
        """
        key = cls, descriptor.full_name
        if key not in self._pairs:
            pair = _Layout(self, cls, descriptor).compiled()
            around = self.exceptions.around.get(cls)
            self._pairs[key] = around(*pair) if around else pair
        return self._pairs[key]


class _Layout:
    """Where the fields of a class stand in a message, as source.

    `_written` has the value of each of the message's fields, `""` for those of the message itself,
    else the name of a message inside it.
    """

    def __init__(self, codec: Codec, cls: type, descriptor: Descriptor) -> None:
        self._codec, self._cls, self._descriptor = codec, cls, descriptor
        self._names: dict[str, Any] = {}
        self._written: dict[str, dict[str, str]] = {"": {}}
        self._hooked: list[str] = []
        own = {field.name for field in fields_of(cls)}
        self._inner = {
            field.name: field.message_type
            for field in descriptor.fields
            if field.message_type and field.name not in own
        }

    def compiled(self) -> tuple[Encode, Decode]:
        """The two functions."""
        read = self._lay(self._cls, "v", "", "**given")
        self._check()
        written = self._written.pop("")
        for name, fields in self._written.items():
            written[name] = _dict_of(fields)
        write = _dict_of(written, *self._hooked)
        source = f"lambda v: {write}", f"lambda m, **given: {read}"
        encode, decode = (eval(text, self._names) for text in source)
        return encode, decode

    def _lay(self, cls: type, own: str, prefix: str, *more: str) -> str:
        """Note how the fields of the value `own` are written; the source that reads it."""
        exceptions = self._codec.exceptions
        read: list[str] = []
        for field in fields_of(cls):
            mine = f"{own}.{field.name}"
            if field.name in exceptions.local.get(cls, ()):
                continue
            if hook := exceptions.hooks.get((cls, field.name)):
                self._hooked.append(f"**{self._bind(hook.write)}({mine})")
                self._written[""].update(dict.fromkeys(hook.fields, ""))
                source = f"{self._bind(hook.read)}(m)"
            elif place := self._place(prefix + field.name):
                group, theirs = place
                path = f"m.{group}" if group else "m"
                write, source = self._field(field, theirs, mine, path)
                self._written.setdefault(group, {})[theirs.name] = write
            elif field.is_value:
                inner_prefix = exceptions.prefixes.get(field.item, "")
                source = self._lay(field.item, mine, inner_prefix)
            else:
                raise TypeError(f"{self._descriptor.name} has no {prefix}{field.name}")
            read.append(f"{field.name}={source}")
        return f"{self._bind(cls)}({', '.join((*read, *more))})"

    def _place(self, name: str) -> tuple[str, FieldDescriptor] | None:
        """The message's field of that name, or that of a message inside it, and its name."""
        if field := self._descriptor.fields_by_name.get(name):
            return "", field
        for inner, message in self._inner.items():
            if field := message.fields_by_name.get(name):
                return inner, field
        return None

    def _field(self, field: Field, theirs: FieldDescriptor, own: str, path: str) -> tuple[str, str]:
        """The source that writes the value `own` to a message's field, and that reads it."""
        message = theirs.message_type
        name = f"{path}.{theirs.name}"
        if message is not None and message.GetOptions().map_entry:
            return f"dict({own})", f"tuple(sorted({name}.items()))"
        write, read = "{}", "{}"
        if field.is_value and message is not None:
            encode, decode = self._codec.pair(field.item, message)
            write, read = f"{self._bind(encode)}({{}})", f"{self._bind(decode)}({{}})"
        elif theirs.enum_type is not None:
            assert theirs.containing_type is not None
            owner = theirs.containing_type.name
            where = f"{self._codec.exceptions.called.get(owner, owner)}.{theirs.name}"
            members = _Members(field.item, where)
            if field.container is None and field.default is not dataclasses.MISSING:
                members[0] = field.default
            read = f"{self._bind(members)}[{{}}]"
        if field.container is not None:
            items = f"[{read.format('x')} for x in {name}]" if read != "{}" else name
            many = f"[{write.format('x')} for x in {own}]" if write != "{}" else own
            plain = field.container is list and read != "{}"
            return many, items if plain else f"{field.container.__name__}({items})"
        write, read = write.format(own), read.format(name)
        if field.none:
            write = f"None if {own} is None else {write}" if field.is_value else own
        if theirs.has_presence and not (message and not field.none):
            default = None if field.none else field.default
            if not field.none:
                write = f"None if {own} == {default!r} else {own}"
            if message or default != theirs.default_value:
                read = f"{read} if {path}.HasField({theirs.name!r}) else {default!r}"
        return write, read

    def _check(self) -> None:
        """Take what the message says besides from the value's properties; refuse what is left."""
        for group, fields in list(self._written.items()):
            message = self._inner[group] if group else self._descriptor
            for theirs in message.fields:
                if theirs.name in fields or (not group and theirs.name in self._written):
                    continue
                if not isinstance(getattr(self._cls, theirs.name, None), property):
                    raise TypeError(f"{self._cls.__name__} has no {theirs.name}")
                fields[theirs.name] = f"v.{theirs.name}"

    def _bind(self, thing: Any) -> str:
        """A name for something in the source."""
        name = f"_{len(self._names)}"
        self._names[name] = thing
        return name


def _dict_of(fields: Mapping[str, str], *more: str) -> str:
    items = [f"{name!r}: {source}" for name, source in fields.items() if source]
    return "{" + ", ".join((*items, *more)) + "}"
