"""Reads rows of data sets: JSON lines, a JSON array (either may be compressed) or parquet.

A path is a file, or a directory with a file for each split, as on the Hugging Face hub. Examples
are taken from another split beside the file if there is one (`gsm8k_train.jsonl` beside
`gsm8k_test.jsonl`), otherwise from the other rows of the same one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.prompts import parse_rows, read_text

_QUESTIONS = ("test", "validation", "val", "dev")
_EXAMPLES = ("train", "dev", "validation", "val")
_SPLIT = re.compile(r"(?<![a-z])(test|validation|val|dev|train)(?![a-z])", re.IGNORECASE)
_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".csv", ".tsv")


@dataclass(frozen=True)
class DataRow:
    """A row of a data set; `where` is its location for errors, `key` its file's name and number."""

    values: Mapping[str, Any]
    where: str
    key: str

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there and not null."""
        return next((v for n in names if (v := self.values.get(n)) is not None), None)

    def text(self, *names: str) -> str:
        """Return the first of these fields that is there, which must be a non-empty string."""
        value = self.get(*names)
        if not isinstance(value, str) or not value:
            raise self.error(f"`{'` or `'.join(names)}` is not a non-empty string")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a field that must be a non-empty list of strings."""
        value = self.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(f"`{name}` is not a list of strings")
        return value

    def error(self, what: str) -> ConfigError:
        fields = ", ".join(self.values) or "(none)"
        return ConfigError(f"{self.where}: {what}; its fields are {fields}")


def read_rows(files: Sequence[Path]) -> list[DataRow]:
    """Read all rows of some files. Raises `ConfigError`."""
    rows = [row for file in files for row in _read_file(file)]
    if not rows:
        raise ConfigError(f"{', '.join(map(str, files))}: contains no rows")
    return rows


def read_with_examples(
    path: str, examples: Sequence[str] = _EXAMPLES
) -> tuple[list[DataRow], list[DataRow]]:
    """Read the questions, and the rows that their examples are taken from.

    Those are of another split beside the questions' file if there is one, or else the same rows.
    """
    files = question_files(path)
    rows = read_rows(files)
    beside = _example_files(files, examples)
    return rows, read_rows(beside) if beside else rows


def question_files(path: str, splits: Sequence[str] = _QUESTIONS) -> list[Path]:
    """Return the file, or a directory's files of the first of these splits that it has."""
    given = Path(path).expanduser()
    if not given.is_dir():
        return [given]
    for split in splits:
        word = re.compile(rf"(?<![a-z]){split}(?![a-z])", re.IGNORECASE)
        files = sorted(f for f in given.iterdir() if f.is_file() and f.name.endswith(_ENDINGS))
        if found := [file for file in files if word.search(file.name)]:
            return found
    raise ConfigError(f"{path}: has no file whose name says {' or '.join(splits)}")


def _example_files(questions: Sequence[Path], splits: Sequence[str]) -> list[Path]:
    """Return the files beside these of the first of these splits that is there, if any is.

    They are named like the questions' but for the split, the numbers of parts and the format.
    """
    alike = re.sub(r"\d+-of-\d+", "*", glob.escape(questions[0].name))
    alike = re.sub(r"\.(jsonl?|parquet)(\.gz)?$", ".*", alike)
    for split in splits:
        pattern, named = _SPLIT.subn(split, alike)
        found = [
            file for file in sorted(questions[0].parent.glob(pattern)) if file not in questions
        ]
        if named and found:
            return found
    return []


def _read_file(file: Path) -> list[DataRow]:
    label = str(file)
    if file.suffix == ".parquet":
        found = [(row, f"{label}: row {i}") for i, row in enumerate(_read_parquet(file), 1)]
    else:
        rows = parse_rows(read_text(label, label), label)
        if rows is None:
            raise ConfigError(f"{label}: is neither JSON lines nor a JSON array of objects")
        found = list(rows)
    for row, where in found:
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: not a JSON object")
    return [DataRow(row, where, f"{file.name} {i}") for i, (row, where) in enumerate(found, 1)]


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    return rows
