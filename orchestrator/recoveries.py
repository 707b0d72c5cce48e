"""What went wrong in a generation and how it was made good, for its completion."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flyspec.types import RecoveryKind

MAX_KEPT = 64
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Recovery:
    """One event; see the proto message of this name. Times in ns."""

    kind: RecoveryKind
    output_token_index: int
    elapsed_ns: int
    delay_ns: int
    successor: str
    reason: str


class Recoveries:
    """Those of one generation: the first `MAX_KEPT` kept, all counted.

    `output_token_index` is kept up by whoever runs the rounds.
    """

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self.output_token_index = 0
        self.kept: list[Recovery] = []
        self.count = 0

    def note(self, kind: RecoveryKind, since_ns: int, successor: str, reason: object) -> None:
        """The trouble that was noticed at `since_ns` (`perf_counter_ns`) is over."""
        self.count += 1
        if len(self.kept) == MAX_KEPT:
            return
        now = time.perf_counter_ns()
        text = str(reason)[:MAX_REASON_CHARACTERS]
        self.kept.append(
            Recovery(
                kind,
                self.output_token_index,
                now - self._began_ns,
                now - since_ns,
                successor,
                text,
            )
        )
