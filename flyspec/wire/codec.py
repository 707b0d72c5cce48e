"""Values to protobuf and back, by the names of their fields.

A value's field is the field of that name in its message. Where there is none, it is in a message
inside it that no field of the value is named after (`usage`), or it is a value whose own fields
stand in its owner's message, with a prefix (`budget`). Absent is None, or the default of a field
that is never None. What differs otherwise is said by `Exceptions`.

For each value class and message the two functions that one would write by hand are put together as
source, once, when they are first needed: nothing is looked up on the way of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
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
        return is_dataclass(self.item) or hasattr(self.item, "_fields")


@lru_cache
def fields_of(cls: Any) -> list[Field]:
    """The fields of a dataclass or named tuple."""
    found = []
    hints = get_type_hints(cls)
    if is_dataclass(cls):
        names = {
            f.name: f.default_factory() if callable(f.default_factory) else f.default
            for f in fields(cls)
        }
    else:
        names = {name: cls._field_defaults.get(name, MISSING) for name in cls._fields}
    for name, default in names.items():
        found.append(_field_of(name, hints[name], default))
    return found


def _field_of(name: str, hint: Any, default: Any = MISSING) -> Field:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    hint = next(kind for kind in kinds if kind is not NoneType)
    outer = get_origin(hint)
    container = None
    if outer in (tuple, Sequence):
        container = tuple if outer is tuple or default == () else list
        hint = get_args(hint)[0]
    return Field(name, hint, container, NoneType in kinds, default)


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
        self._given = ""  # the decoder's parameters: what does not travel
        own = {field.name for field in fields_of(cls)}
        self._inner = {
            field.name: field.message_type
            for field in descriptor.fields
            if field.message_type and field.name not in own
        }

    def compiled(self) -> tuple[Encode, Decode]:
        """The two functions."""
        read = self._lay(self._cls, "v")
        self._check()
        written = self._written.pop("")
        for name, inner in self._written.items():
            written[name] = _dict_of(inner)
        source = f"lambda v: {_dict_of(written, *self._hooked)}", f"lambda m{self._given}: {read}"
        encode, decode = (eval(text, self._names) for text in source)
        return encode, decode

    def _lay(self, cls: type, own: str, prefix: str = "") -> str:
        """Note how the fields of the value `own` are written; the source that reads it."""
        read = [self._lay_field(cls, f, f"{own}.{f.name}", prefix) for f in fields_of(cls)]
        return f"{self._bind(cls)}({', '.join(read)})"

    def _lay_field(self, cls: type, field: Field, own: str, prefix: str) -> str:
        exceptions, name = self._codec.exceptions, prefix + field.name
        if field.name in exceptions.local.get(cls, ()):
            default = "" if field.default is MISSING else f"={self._bind(field.default)}"
            if cls is not self._cls:
                return default[1:]
            self._given += f", {field.name}{default}"
            return field.name
        if hook := exceptions.hooks.get((cls, field.name)):
            self._hooked.append(f"**{self._bind(hook.write)}({own})")
            self._written[""].update(dict.fromkeys(hook.fields, ""))
            return f"{self._bind(hook.read)}(m)"
        if place := self._place(name):
            group, theirs = place
            write, read = self._field(field, theirs, own, f"m.{group}" if group else "m")
            self._written.setdefault(group, {})[theirs.name] = write
            return read
        if field.is_value:
            return self._lay(field.item, own, exceptions.prefixes.get(field.item, ""))
        raise TypeError(f"{self._descriptor.name} has no {name}")

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
        encode = decode = ""
        if field.is_value and message is not None:
            encode, decode = map(self._bind, self._codec.pair(field.item, message))
        elif theirs.enum_type is not None:
            decode = self._bind(self._members(field, theirs).__getitem__)
        if field.container is not None:  # a slice is read at once
            write = f"[*map({encode}, {own})]" if encode else own
            read = f"[*map({decode}, {name}[:])]" if decode else f"{name}[:]"
            return write, read if field.container is list else f"tuple({read})"
        write, read = (f"{encode}({own})" if encode else own), f"{decode}({name})"
        given = f"{path}.HasField({theirs.name!r})"
        if field.none and theirs.has_presence:
            write = f"None if {own} is None else {write}" if encode else own
            read = f"{read} if {given} else None"
        elif theirs.has_presence and not message:  # the default stays unset
            write = f"None if {own} == {field.default!r} else {own}"
            if field.default != theirs.default_value:
                read = f"{read} if {given} else {field.default!r}"
        return write, read

    def _members(self, field: Field, theirs: FieldDescriptor) -> _Members:
        """The members of a field's enum; 0, unspecified, is its default if it has one."""
        assert theirs.containing_type is not None
        owner = theirs.containing_type.name
        owner = self._codec.exceptions.called.get(owner, owner)
        members = _Members(field.item, f"{owner}.{theirs.name}")
        if field.container is None and field.default is not MISSING:
            members[0] = field.default
        return members

    def _check(self) -> None:
        """Take what the message says besides from the value's properties; refuse what is left."""
        for group, written in list(self._written.items()):
            message = self._inner[group] if group else self._descriptor
            for theirs in message.fields:
                if theirs.name in written or (not group and theirs.name in self._written):
                    continue
                derived = getattr(self._cls, theirs.name, None)
                if not isinstance(derived, property):
                    raise TypeError(f"{self._cls.__name__} has no {theirs.name}")
                field = _field_of(theirs.name, get_type_hints(derived.fget)["return"])
                written[theirs.name], _ = self._field(field, theirs, f"v.{theirs.name}", "m")

    def _bind(self, thing: Any) -> str:
        """A name for something in the source."""
        name = f"_{len(self._names)}"
        self._names[name] = thing
        return name


def _dict_of(fields: Mapping[str, str], *more: str) -> str:
    items = [f"{name!r}: {source}" for name, source in fields.items() if source]
    return "{" + ", ".join((*items, *more)) + "}"
