"""The loop guard: notices that an output has begun to repeat itself. Pure, cheap a token.

Lossy rules can lead a text into a cycle that the target would not have entered; from there on the
target agrees with it. What is judged exactly can leave the cycle again, or is the target's own.
"""

from __future__ import annotations

from collections import deque

MAX_UNIT_TOKENS = 32
"""Longest unit looked for: a sentence or a line."""
MIN_REPEATS = 4
"""Times that the unit must stand there."""
MIN_TOKENS = 48
"""Tokens that the cycle must cover: more than indentation, a row of digits or a short list."""


class LoopGuard:
    """Looks for a unit of 1 to 32 tokens that ends the output, repeated in full.

    It must stand there at least 4 times and cover at least 48 tokens: a single token 48 times, 12
    tokens 4 times, 32 tokens 4 times. Numbered lists do not count, since their numbers differ.
    """

    __slots__ = ("_recent", "_runs", "num_tokens", "token_index")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_UNIT_TOKENS)  # latest first
        # For every unit length at which the output repeats now: tokens equal to the one a unit
        # before them, in an unbroken run up to the last.
        self._runs: dict[int, int] = {}
        self.num_tokens = 0
        self.token_index: int | None = None
        """Tokens of the output at which the first cycle was complete; None if there was none."""

    def push(self, token_id: int) -> None:
        """Take in the next final token of the output. One pass over the last 32 tokens."""
        self.num_tokens += 1
        runs = self._runs
        self._runs = {
            unit: runs.get(unit, 0) + 1
            for unit, earlier in enumerate(self._recent, 1)
            if earlier == token_id
        }
        self._recent.appendleft(token_id)
        if self.token_index is None and any(
            run + unit >= max(MIN_TOKENS, MIN_REPEATS * unit) for unit, run in self._runs.items()
        ):
            self.token_index = self.num_tokens
