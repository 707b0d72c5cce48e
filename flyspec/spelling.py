"""Names in messages: suggestions for misspelled ones, and settings as the user gave them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

_ALIKE = 0.54
"""Minimum likeness of a suggestion: `fp16` is like `float16`."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b")
_WITH_VALUE = re.compile(r"(--[a-z][a-z0-9-]*) (\S+):")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" if a known word is close to `word`, else ""."""
    close = difflib.get_close_matches(word.lower(), filter(None, known), 1, _ALIKE)
    return f" (did you mean {close[0]}?)" if close and close[0] != word else ""


def install_command(extra: str) -> str:
    """Return how an extra of flyspec is installed, which no package index has."""
    laboratory = " ./lab" if "lab" in extra.split(",") else ""
    return f"pip install '.[{extra}]'{laboratory} in flyspec's checkout"


def respell(message: str, names: Mapping[str, str]) -> str:
    """Replace flags by the names under which they were set, such as environment variables.

    `--device x: unknown` becomes `FLYSPEC_DRAFT_DEVICE=x: unknown`.
    """
    if not names:
        return message
    start = _WITH_VALUE.match(message)
    if start and start[1] in names and not names[start[1]].startswith("--"):
        message = f"{names[start[1]]}={start[2]}:{message[start.end() :]}"
    return _FLAG.sub(lambda found: names.get(found[0], found[0]), message)
