"""The document of a test as JSON: short numbers, no NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError

DIGITS = 5
VERSION = 1


def to_json(document: dict[str, Any]) -> str:
    """A line a key: `DIGITS` significant digits are more than a measurement has; NaN is null."""
    lines = (f"{json.dumps(k)}: {json.dumps(short(v))}" for k, v in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> dict[str, Any]:
    """A document from its file. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ConfigError(f"{path}: is not a report of a load test of this version")
    return document


def short(value: Any) -> Any:
    """The same with short numbers, and None for what is no number."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value == 0 or abs(value) >= 10**DIGITS:
            return round(value)
        return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [short(v) for v in value]
    return value
