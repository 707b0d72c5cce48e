"""What went wrong in a generation and how it was made good, for its completion."""

from __future__ import annotations

import time
from collections.abc import Callable

from flyspec.values.generation import Recovery, RecoveryKind

MAX_KEPT = 64
MAX_REASON_CHARACTERS = 300


class Recoveries:
    """Those of one generation: the first `MAX_KEPT` kept, all counted and told to `listener`.

    `output_token_index` is kept up by whoever runs the rounds.
    """

    def __init__(self, listener: Callable[[Recovery], None] = lambda _: None) -> None:
        self._began_ns = time.perf_counter_ns()
        self._listener = listener
        self.output_token_index = 0
        self.kept: list[Recovery] = []
        self.count = 0

    def note(self, kind: RecoveryKind, since_ns: int, successor: str, reason: object) -> None:
        """The trouble that was noticed at `since_ns` (`perf_counter_ns`) is over."""
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
