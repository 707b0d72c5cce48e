"""The reference page of the gRPC API, from the protos and their comments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from docs.site.tables import table

PROTOS = Path(__file__).resolve().parents[2] / "protos"
FILES = ("generation", "admin", "common", "draft", "verify")
SERVICE, MESSAGE, ENUM = 6, 4, 5
"""Numbers of the fields of a file descriptor, which begin the paths of its comments."""
_Path = tuple[int, ...]


def page() -> str:
    """Return the page: services, messages and enums by file."""
    parts = [
        "# gRPC API\n\nClients use `generation.proto`; operators use `admin.proto`, which is on a "
        "port of its own. The other files are for drafters and targets that you write. Every "
        "server supports reflection and `grpc.health.v1`.\n\n"
    ]
    described = {Path(file.name).stem: file for file in _descriptors().file}
    for name in FILES:
        parts.extend(_file(described[name]))
    return "".join(parts)


def _descriptors() -> FileDescriptorSet:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        names = [f"flyspec/v1/{name}.proto" for name in FILES]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info",
             f"--descriptor_set_out={out}", *names], cwd=PROTOS, check=True,
        )  # fmt: skip
        return FileDescriptorSet.FromString(out.read_bytes())


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(c.path): c.leading_comments or c.trailing_comments
                for c in file.source_code_info.location}  # fmt: skip

    def said(*path: int) -> str:
        return _escape(" ".join(comments.get(path, "").split()))

    yield f"## {file.name}\n\n"
    for number, service in enumerate(file.service):
        yield f"### {service.name}\n\n{said(SERVICE, number)}\n\n"
        rows = []
        for index, rpc in enumerate(service.method):
            asked = f"{'stream of ' * rpc.client_streaming}{_link(rpc.input_type)}"
            given = f"{'stream of ' * rpc.server_streaming}{_link(rpc.output_type)}"
            rows.append((f"`{rpc.name}`", asked, given, said(SERVICE, number, 2, index)))
        yield table(["RPC", "request", "response", ""], rows) + "\n"
    for number, message in enumerate(file.message_type):
        yield from _message(message, message.name, (MESSAGE, number), said)
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, enum.name, (ENUM, number), said)


def _message(message: Any, name: str, path: _Path, said: Any) -> Iterator[str]:
    maps = {n.name: n for n in message.nested_type if n.options.map_entry}
    yield f"({_anchor(name)})=\n### {name}\n\n{said(*path)}\n\n"
    rows = []
    for index, field in enumerate(message.field):
        entry = maps.get(field.type_name.split(".")[-1])
        kind = f"map of {_type(entry.field[0])} to {_type(entry.field[1])}" if entry else (
            f"{'repeated ' * (field.label == field.LABEL_REPEATED)}{_type(field)}"
        )  # fmt: skip
        optional = "optional " * field.proto3_optional
        rows.append((f"`{field.name}`", optional + kind, said(*path, 2, index)))
    if rows:
        yield table(["field", "type", ""], rows) + "\n"
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, f"{name}.{nested.name}", (*path, 3, index), said)


def _enum(enum: Any, name: str, path: _Path, said: Any) -> Iterator[str]:
    yield f"({_anchor(name)})=\n### {name}\n\n{said(*path)}\n\n"
    rows = [(f"`{v.name}`", str(v.number), said(*path, 2, i)) for i, v in enumerate(enum.value)]
    yield table(["value", "number", ""], rows) + "\n"


def _type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(full_name: str) -> str:
    name = full_name.removeprefix(".flyspec.v1.")
    return f"`{name.lstrip('.')}`" if name.startswith(".") else f"[{name}](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return f"message-{name.lower().replace('.', '-')}"


def _escape(text: str) -> str:
    """Keep Markdown's signs outside code as they are."""
    pieces = text.split("`")
    for index in range(0, len(pieces), 2):
        for sign in "*_[]":
            pieces[index] = pieces[index].replace(sign, f"\\{sign}")
    return "`".join(pieces)
