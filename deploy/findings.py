"""What a check does and finds, as it prints it."""

from __future__ import annotations

import time


class Log:
    """Says what is done and found, and keeps count of what is not as it should be."""

    def __init__(self) -> None:
        self.failures = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Something worth knowing."""
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    def check(self, what: str, right: bool, found: object = "") -> None:
        """Something that must be so."""
        self.failures += not right
        self.say(f"{'ok' if right else 'FAILED'}: {what}{f' ({found})' if found != '' else ''}")

    def skipped(self, what: str, why: object) -> None:
        """Something that could not be checked."""
        print(f"{'*' * 75}\n*** SKIPPED: {what}: {why}\n{'*' * 75}")
