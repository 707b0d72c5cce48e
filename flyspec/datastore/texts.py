"""Reads the texts of a datastore from files and directories."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from flyspec.errors import ConfigError

TEXT_FIELDS = ("text", "content")
"""Fields of a JSON line that may have its text."""


def read_texts(paths: Sequence[Path], pattern: str = "*") -> Iterator[str]:
    """Yield the texts of files, and of all files below directories that match `pattern`.

    Each line of JSON lines (`.jsonl`, `.jsonl.gz`) has a text; any other file is one. Below
    directories, files that are not UTF-8 are skipped, as is what is hidden. Raises `ConfigError`.
    """
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob(pattern)):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    yield from _texts_of(file, or_skip=True)
        else:
            yield from _texts_of(path)


def _texts_of(path: Path, or_skip: bool = False) -> Iterator[str]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        if or_skip:
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: {reason}") from None
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        if text:
            yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_of(line, f"{path}:{number}")


def _text_of(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    for name in TEXT_FIELDS:
        if isinstance(fields, dict) and isinstance(fields.get(name), str):
            text: str = fields[name]
            return text
    raise ConfigError(f"{where}: needs a text in the field {' or '.join(TEXT_FIELDS)}")
