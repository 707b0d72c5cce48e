"""The reference page of the services' settings, from their classes."""

from __future__ import annotations

from typing import Any, get_args

from docs.site.tables import table
from flyspec.config import DraftSettings, OrchestratorSettings, ServerSettings, VerifySettings

SERVICES: dict[str, type[ServerSettings]] = {
    "orchestrator": OrchestratorSettings,
    "verify_service": VerifySettings,
    "draft_service": DraftSettings,
}


def page() -> str:
    """Return the page: each service's flags, variables, defaults and meanings."""
    parts = [
        "# Settings\n\nEvery setting of a service is a flag and an environment variable; the flag "
        "takes precedence. `flyspec serve` passes the variables on to the services that it "
        "starts.\n\n"
    ]
    for module, service in SERVICES.items():
        prefix = service.model_config["env_prefix"]
        rows = [
            (f"`--{name.replace('_', '-')}`", f"`{(prefix + name).upper()}`", _default(field),
             f"{field.description or ''}{_range(field)}")
            for name, field in service.model_fields.items()
        ]  # fmt: skip
        parts += [f"## python -m {module}\n\n", table(["flag", "variable", "default", ""], rows)]
        parts.append("\n")
    return "".join(parts)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    if field.default is None or field.default == "":
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _range(field: Any) -> str:
    """The permitted values, from the field's type and bounds."""
    bounds = [
        f"{words} {value}"
        for words, attribute in (("at least", "ge"), ("above", "gt"), ("at most", "le"))
        for metadata in field.metadata
        if (value := getattr(metadata, attribute, None)) is not None
    ]
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    if choices:
        bounds.append(" or ".join(f"`{choice}`" for choice in choices))
    return f" ({', '.join(bounds)})" if bounds else ""
