"""K, the number of tokens that a round drafts, as users give it: a number, or `auto`."""

from __future__ import annotations

from typing import Final, Literal

AUTO: Final = "auto"
"""K adapts: each round drafts as many tokens as pay, none included."""
SpeculationLength = int | Literal["auto"]

REQUESTED_BY_AUTO = 15
"""The K that a rule's window is resolved from where K adapts."""
MOST_BY_AUTO = 32
"""Most tokens that a round drafts where K adapts."""


def read_speculation_length(text: str | int) -> SpeculationLength:
    """K of what was typed. Raises `ValueError`."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a number or {AUTO}, got {text!r}") from None


def requested(k: SpeculationLength) -> int:
    """The K that a rule's window is resolved from."""
    return REQUESTED_BY_AUTO if k == AUTO else k
