"""A clock set by the test."""

from __future__ import annotations


class Clock:
    """Returns `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
