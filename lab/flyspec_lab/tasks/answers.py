"""Finds the number that a text gives as its answer."""

from __future__ import annotations

import re

from flyspec.prompts import normal_number

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)


def last_number(text: str) -> str | None:
    """Return the number after the last `####`, or else the last number; None if there is none."""
    found = _MARKED.findall(text) or _ANY.findall(text)
    return normal_number(found[-1]) if found else None
