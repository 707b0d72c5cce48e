"""The generated reference pages: command line, HTTP API, settings of the services."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from inspect import cleandoc
from typing import Any

import typer.main

from flyspec.cli.help import sections_of
from flyspec.cli.main import app
from flyspec.config import DraftSettings, OrchestratorSettings, ServerSettings, VerifySettings
from orchestrator.front.http.app import openapi_schema

SERVICES: dict[str, type[ServerSettings]] = {
    "orchestrator": OrchestratorSettings,
    "verify_service": VerifySettings,
    "draft_service": DraftSettings,
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; line breaks and bars in cells are kept from breaking it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]  # not in code
    return "`".join(pieces)


# --- the command line, from the programs themselves ---------------------------------------------


def command_line() -> str:
    """Return every command with its arguments and options."""
    root = typer.main.get_command(app)
    return "".join(["# Command line\n\n", *_command(root, None, "flyspec")])


def _command(command: Any, parent: Any, path: str) -> Iterator[str]:
    context = command.context_class(command, info_name=path.split()[-1], parent=parent)
    subcommands = hasattr(command, "list_commands")
    yield f"## {path}\n\n"
    yield cleandoc(command.help or "") + "\n\n"
    usage = " ".join(piece.strip("{}") for piece in command.collect_usage_pieces(context))
    yield f"```text\n{path} {usage}\n```\n\n"
    for heading, records in sections_of(command, context).items():
        yield f"**{heading}**\n\n"
        yield table(["", ""], [(f"`{flag}`", _escaped(text)) for flag, text in records]) + "\n"
    if subcommands:
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            if not found.hidden:
                yield from _command(found, context, f"{path} {name}")


def _escaped(text: str) -> str:
    """Keep Markdown's signs as they are; code between backquotes stays code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", p) for p in pieces)


# --- the HTTP API, from the OpenAPI schema that the orchestrator serves -------------------------


def http_api() -> str:
    """Return every path, then every object that requests are made of."""
    schema = openapi_schema()
    parts = [
        "# HTTP API\n\nFrom the schema that a server has at `/openapi.json`. What differs from "
        "OpenAI's API, with examples: [HTTP](../http.md).\n\n"
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"## {method.upper()} {path}\n\n{operation.get('description', '')}\n\n")
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                parts.append(f"Body: {_type(body['schema'])}\n\n")
            for parameter in operation.get("parameters", ()):
                kind = _type(parameter["schema"])
                parts.append(f"`{parameter['name']}` ({parameter['in']}): {kind}\n\n")
    parts.append("## Objects\n\n")
    for name, known in sorted(schema["components"]["schemas"].items()):
        parts.append(f"(schema-{name.lower()})=\n### {name}\n\n{known.get('description', '')}\n\n")
        if rows := [(f"`{name}`", *told) for name, *told in _fields(known)]:
            parts.append(table(["field", "type", "default", ""], rows) + "\n")
        elif "enum" in known:
            parts.append(", ".join(f"`{value}`" for value in known["enum"]) + "\n\n")
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and description of each property in a JSON schema."""
    for name, told in schema.get("properties", {}).items():
        default = told.get("default")
        if name in schema.get("required", ()):
            shown = "required"
        elif default in (None, "", [], {}):
            shown = ""
        else:
            shown = f"`{str(default).lower() if isinstance(default, bool) else default}`"
        yield name, _type(told), shown, told.get("description", "").replace("*", "\\*")


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].split("/")[-1]
        return f"[{name}](#schema-{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = dict.fromkeys(_type(s) for s in schema[key] if s.get("type") != "null")
            return " or ".join(kinds)
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{v}`" for v in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    bounds = [
        f"{words} {schema[name]}"
        for name, words in (("minimum", "at least"), ("exclusiveMinimum", "above"),
                            ("maximum", "at most"), ("exclusiveMaximum", "below"))
        if name in schema
    ]  # fmt: skip
    return f"{kind}, {', '.join(bounds)}" if bounds else str(kind)


# --- settings, from their classes ---------------------------------------------------------------


def settings() -> str:
    """Return each service's flags, variables, types, defaults and meanings."""
    parts = [
        "# Settings\n\nEvery setting of a service is a flag and an environment variable; the flag "
        "takes precedence. `flyspec serve` passes the variables on to the services that it "
        "starts.\n\n"
    ]
    for module, service in SERVICES.items():
        prefix = service.model_config["env_prefix"]
        rows = [
            (f"`--{name.replace('_', '-')}`", f"`{(prefix + name).upper()}`", *told)
            for name, *told in _fields(service.model_json_schema())
        ]
        head = ["flag", "variable", "type", "default", ""]
        parts.append(f"## python -m {module}\n\n{table(head, rows)}\n")
    return "".join(parts)
