"""Failures a generation recovered from, reported in its completion."""

from __future__ import annotations

import time
from collections.abc import Callable

from flyspec.values.generation import Recovery, RecoveryKind

MAX_KEPT = 64
MAX_REASON_CHARACTERS = 300


class Recoveries:
    """One generation's recoveries: keeps the first `MAX_KEPT`, counts all and calls `listener`.

    `output_token_index` is updated by `Rounds`.
    """

    def __init__(self, listener: Callable[[Recovery], None] = lambda _: None) -> None:
        self._began_ns = time.perf_counter_ns()
        self._listener = listener
        self.output_token_index = 0
        self.kept: list[Recovery] = []
        self.count = 0

    def note(self, kind: RecoveryKind, since_ns: int, successor: str, reason: object) -> None:
        """Record recovery from a failure noticed at `since_ns` (`perf_counter_ns`)."""
        self.count += 1
        now = time.perf_counter_ns()
        recovery = Recovery(
            kind,
            self.output_token_index,
            now - self._began_ns,
            now - since_ns,
            successor,
            str(reason)[:MAX_REASON_CHARACTERS],
        )
        if len(self.kept) < MAX_KEPT:
            self.kept.append(recovery)
        self._listener(recovery)
