"""Reads JSON reports in a folder, and writes what they say into a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.tables import FittedTable, markdown


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


def write_part(path: Path, name: str, tables: Sequence[FittedTable] | None) -> None:
    """Replace a part of a document by tables in Markdown, each below its title.

    With None, only check that the document has the part. Raises `ConfigError`.
    """
    parts = [
        f"{table.title}:\n\n{markdown(table.columns, _texts(table), table.left)}"
        for table in tables or ()
        if table.rows
    ]
    try:
        written = write_between(path.read_text(), {name: "\n\n".join(parts)})
        if tables is not None:
            path.write_text(written)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _texts(table: FittedTable) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in table.rows]


def write_between(text: str, parts: Mapping[str, str]) -> str:
    """Replace the text between each part's two marks. Raises `ConfigError`."""
    for name, part in parts.items():
        marks = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        pieces = re.split(marks, text, flags=re.DOTALL)
        if len(pieces) == 4:
            text = f"{pieces[0]}{pieces[1]}\n{part}\n\n{pieces[2]}{pieces[3]}"
        else:
            raise ConfigError(f"the document must have <!-- {name} --> and <!-- /{name} --> once")
    return text
