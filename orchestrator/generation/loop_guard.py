"""The loop guard: detects that an output has begun to repeat itself, cheaply per token.

Lossy rules can lead an output into a cycle that the target would not have entered, but agrees with
from then on. With exact acceptance, the output can leave the cycle; if not, it is the target's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy

MAX_UNIT_TOKENS = 32
"""Longest repeating unit detected: a sentence or a line."""
MIN_REPEATS = 4
"""Minimum occurrences of the unit."""
MIN_TOKENS = 48
"""Minimum tokens in the cycle: more than indentation, a row of digits or a short list."""


class LoopGuard:
    """Detects a unit of 1 to 32 tokens repeated at the end of the output.

    It must occur at least 4 times in full and cover at least 48 tokens: a single token 48 times, 12
    tokens 4 times, 32 tokens 4 times. Numbered lists do not count, since their numbers differ.
    """

    __slots__ = ("_recent", "_runs", "num_tokens", "token_index")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_UNIT_TOKENS)  # latest first
        # For every unit length at which the output currently repeats: length of the unbroken run,
        # up to the last token, of tokens equal to the one a unit before them.
        self._runs: dict[int, int] = {}
        self.num_tokens = 0
        self.token_index: int | None = None
        """Number of output tokens when the first cycle was complete; None if there was none."""

    def would_trigger(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens, pushed next, would complete a cycle, or one is complete."""
        guard = copy(self)
        guard._recent = self._recent.copy()
        for token_id in token_ids:
            guard.push(token_id)
        return guard.token_index is not None

    def push(self, token_id: int) -> None:
        """Add the next final output token. Makes one pass over the last 32 tokens."""
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
