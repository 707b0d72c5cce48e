"""How a command takes groups of flags: dataclass parameters become one flag a field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters by one flag a field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            fields = get_type_hints(hints[name], include_extras=True)
            for f in dataclasses.fields(hints[name]):
                parameters[f.name] = inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default,
                    annotation=fields[f.name],
                )  # fmt: skip
        else:
            parameters[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]
            )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
        command(**values)

    wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    wrapper.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    del wrapper.__wrapped__
    return wrapper
