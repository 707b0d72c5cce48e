"""The reference page of the HTTP API, from the OpenAPI schema that the orchestrator serves."""

from __future__ import annotations

from typing import Any

from docs.site.tables import table
from orchestrator.front.http.app import openapi_schema


def page() -> str:
    """Return the page: every path, then every object that requests are made of."""
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
        required = known.get("required", ())
        rows = [
            (f"`{field}`", _type(told), _default(told, field in required), _text(told))
            for field, told in known.get("properties", {}).items()
        ]
        if rows:
            parts.append(table(["field", "type", "default", ""], rows) + "\n")
        elif "enum" in known:
            parts.append(", ".join(f"`{value}`" for value in known["enum"]) + "\n\n")
    return "".join(parts)


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


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    return "" if default in (None, "", [], {}) else f"`{default}`"


def _text(schema: dict[str, Any]) -> str:
    return str(schema.get("description", "")).replace("*", "\\*")
