"""Printing what a check finds."""

from __future__ import annotations

import time


class Log:
    """Prints findings with the seconds since the start, and counts failures."""

    def __init__(self) -> None:
        self.failures = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print something worth knowing."""
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    def check(self, what: str, right: bool, found: object = "") -> None:
        """Print whether something is as it must be, and details."""
        self.failures += not right
        self.say(f"{'ok' if right else 'FAILED'}: {what}{f' ({found})' if found != '' else ''}")

    def skipped(self, what: str, why: object) -> None:
        print(f"{'*' * 75}\n*** SKIPPED: {what}: {why}\n{'*' * 75}")
