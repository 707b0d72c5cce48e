"""Reads the JSON reports of `flyspec bench` in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError


def read_documents(
    folder: Path, kinds: Mapping[str, str]
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield each file's path, the kind of its report and the report, in the order of the names.

    `kinds` maps a field that only this kind has to the kind; it is empty for others. Raises
    `ConfigError` for a file that is no JSON.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        yield path, next((kind for field, kind in kinds.items() if field in document), ""), document
