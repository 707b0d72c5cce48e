"""K, the maximum drafted tokens per round, as users give it: a number, or `auto`."""

from __future__ import annotations

from typing import Final, Literal

AUTO: Final = "auto"
"""K adapts: each round drafts as many tokens as pay off, possibly none."""
SpeculationLength = int | Literal["auto"]

REQUESTED_BY_AUTO = 15
"""The K from which a rule's window is resolved when K adapts."""
MOST = 1024
"""Maximum K that any service can be set to allow."""
MOST_BY_AUTO = 32
"""Maximum drafted tokens per round when K adapts."""


def read_speculation_length(text: str | int) -> SpeculationLength:
    """Parse K. Raises `ValueError`."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a number or {AUTO}, got {text!r}") from None


def read_default_length(text: str | int) -> SpeculationLength:
    """Parse K of a setting, which no service can exceed. Raises `ValueError`."""
    k = read_speculation_length(text)
    if k != AUTO and not 0 <= k <= MOST:
        raise ValueError(f"must be between 0 and {MOST}, or {AUTO}")
    return k


def excess(k: SpeculationLength, most: int) -> str:
    """Return why services that allow so many tokens per round cannot have this K; else empty."""
    if k == AUTO or k <= most:
        return ""
    return f"--num-speculative-tokens {k}: the services allow at most {most}; use {most} or less"


def requested(k: SpeculationLength) -> int:
    """Return the K from which a rule's window is resolved."""
    return REQUESTED_BY_AUTO if k == AUTO else k
