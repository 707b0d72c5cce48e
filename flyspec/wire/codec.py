"""Conversion between values and messages, by the names of their fields.

A value's field maps to the message field of that name. If there is none, it is in a submessage that
no field of the value is named after (`usage`), or it is a value whose own fields are inlined in the
owner's message (`budget`). Remaining message fields are properties of the value. Absent means None,
or the default of a field that is never None. `messages` lists exceptions. The conversion functions
are generated as source code at first use, so they are as fast as if written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, lru_cache
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from flyspec.errors import InvalidArgumentError
from flyspec.wire.messages import AROUND, CALLED, HOOKS, LOCAL, PREFIXES, Decode, Encode


class Field(NamedTuple):
    """A field of a value; `item` is its type, or that of its items; `none`: it may be None."""

    name: str
    item: Any
    container: type | None
    none: bool
    default: Any

    @property
    def is_value(self) -> bool:
        """True if its type has fields itself."""
        return is_dataclass(self.item) or hasattr(self.item, "_fields")


@lru_cache
def fields_of(cls: Any) -> list[Field]:
    """Return the fields of a dataclass or named tuple."""
    hints, parameters = get_type_hints(cls), signature(cls).parameters
    return [_field_of(name, hints[name], p.default) for name, p in parameters.items()]


def _field_of(name: str, hint: Any, default: Any = Parameter.empty) -> Field:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    hint = next(kind for kind in kinds if kind is not NoneType)
    outer, container = get_origin(hint), None
    if outer in (tuple, list, Sequence):
        container = tuple if outer is tuple or default == () else list
        hint = get_args(hint)[0]
    return Field(name, hint, container, NoneType in kinds, default)


class _Members(dict[int, Any]):
    """An enum's members by number, 0 for the default if there is one; others raise an error."""

    def __init__(self, field: Field, theirs: FieldDescriptor) -> None:
        super().__init__({int(member): member for member in field.item})
        *_, owner, name = theirs.full_name.split(".")
        known = ", ".join(f"{member.name.lower()} ({number})" for number, member in self.items())
        self._where, self._known = f"{CALLED.get(owner, owner)}.{name}", known
        if field.container is None and field.default is not Parameter.empty:
            self[0] = field.default

    def __missing__(self, number: int) -> Any:
        raise InvalidArgumentError(f"{self._where}: {number} is not one of {self._known}")


@cache
def pair(cls: Any, descriptor: Any) -> tuple[Encode, Decode]:
    """Return encoder and decoder of a class for a message type.

    Raises TypeError if one has a field that the other lacks.
    """
    compiled = _Layout(cls, descriptor).compiled()
    return AROUND[cls](*compiled) if cls in AROUND else compiled


class _Layout:
    """Generates source code for a class and its message: `v` is the value, `m` the message.

    `_written` has the source of each field, by submessage (`""`: the message itself).
    """

    def __init__(self, cls: Any, descriptor: Descriptor) -> None:
        self._cls, self._descriptor = cls, descriptor
        self._names: dict[str, Any] = {}
        self._written: dict[str, dict[str, str]] = {"": {}}
        self._hooked: dict[str, list[str]] = {}
        self._given = ""  # parameters for fields that are not sent
        own = {field.name for field in fields_of(cls)}
        self._inner = {
            field.name: field.message_type
            for field in descriptor.fields
            if field.message_type and field.name not in own
        }

    def compiled(self) -> tuple[Encode, Decode]:
        read = self._lay(self._cls, "v")
        self._complete()
        written = self._written.pop("")
        hooked = self._hooked
        written |= {n: _dict_of(w, *hooked.get(n, ())) for n, w in self._written.items()}
        write = _dict_of(written, *hooked.get("", ()))
        source = f"lambda v: {write}", f"lambda m{self._given}: {read}"
        encode, decode = (eval(text, self._names) for text in source)
        return encode, decode

    def _lay(self, cls: Any, own: str, prefix: str = "") -> str:
        """Record how the fields of the value `own` are written; return the source that reads it."""
        read = [self._lay_field(cls, f, f"{own}.{f.name}", prefix) for f in fields_of(cls)]
        return f"{self._bind(cls)}({', '.join(read)})"

    def _lay_field(self, cls: Any, field: Field, own: str, prefix: str) -> str:
        name = prefix + field.name
        if field.name in LOCAL.get(cls, ()):
            default = "" if field.default is Parameter.empty else f"={self._bind(field.default)}"
            if cls is not self._cls:
                return default[1:]
            self._given += f", {field.name}{default}"
            return field.name
        if hook := HOOKS.get((cls, field.name)):
            covered, write, read = hook[0], self._bind(hook[1]), self._bind(hook[2])
            messages = {"": self._descriptor, **self._inner}
            inner = next(n for n, m in messages.items() if covered[0] in m.fields_by_name)
            self._hooked.setdefault(inner, []).append(f"**{write}({own})")
            self._written.setdefault(inner, {}).update(dict.fromkeys(covered, ""))
            return f"{read}(m.{inner})" if inner else f"{read}(m)"
        for inner, message in {"": self._descriptor, **self._inner}.items():
            if theirs := message.fields_by_name.get(name):
                write, read = self._field(field, theirs, own, f"m.{inner}" if inner else "m")
                self._written.setdefault(inner, {})[name] = write
                return read
        if field.is_value:
            return self._lay(field.item, own, PREFIXES.get(field.item, ""))
        raise TypeError(f"{self._descriptor.name} has no {name}")

    def _field(self, field: Field, theirs: FieldDescriptor, own: str, path: str) -> tuple[str, str]:
        """Return the source that writes the value `own` to a message field, and that reads it."""
        message, name = theirs.message_type, f"{path}.{theirs.name}"
        if message is not None and message.GetOptions().map_entry:
            return f"dict({own})", f"tuple(sorted({name}.items()))"
        encode = decode = ""
        if field.is_value:
            encode, decode = map(self._bind, pair(field.item, message))
        elif theirs.enum_type is not None:
            decode = self._bind(_Members(field, theirs).__getitem__)
        if field.container is not None:  # a slice copies all items in one call
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

    def _complete(self) -> None:
        """Write the message's remaining fields from properties; raise if there is none."""
        for inner, written in list(self._written.items()):
            for theirs in (self._inner[inner] if inner else self._descriptor).fields:
                if theirs.name in written or (not inner and theirs.name in self._written):
                    continue
                derived = getattr(self._cls, theirs.name, None)
                if not isinstance(derived, property):
                    raise TypeError(f"{self._cls.__name__} has no {theirs.name}")
                field = _field_of(theirs.name, get_type_hints(derived.fget)["return"])
                written[theirs.name], _ = self._field(field, theirs, f"v.{theirs.name}", "m")

    def _bind(self, thing: Any) -> str:
        """Return a name for an object in the source."""
        name = f"_{len(self._names)}"
        self._names[name] = thing
        return name


def _dict_of(written: Mapping[str, str], *more: str) -> str:
    items = [f"{name!r}: {source}" for name, source in written.items() if source]
    return "{" + ", ".join((*items, *more)) + "}"
