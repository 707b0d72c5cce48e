"""Decides which sequences' tokens run in a step, and how many of each. Pure, and without torch.

Short work (rounds of running sessions) goes first and uncut. Long work (prompts) fills the rest in
chunks, so that a step takes no longer than the chunk allows, however long a prompt is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flyspec.engine.model import Step

SHORT_TOKENS = 128
"""Maximum tokens of short work, unless the chunk is smaller."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens: for all work, and for long work alone."""

    max_tokens: int = 2048
    prefill_chunk: int = 512

    @property
    def short(self) -> int:
        """Maximum tokens of work that is not cut."""
        return min(SHORT_TOKENS, self.prefill_chunk)

    @property
    def reserved(self) -> int:
        """Tokens that short work leaves to long work even under overload."""
        return min(self.prefill_chunk, self.max_tokens // 4)


class Pieces:
    """A step that runs in one piece or several."""

    __slots__ = ("_done", "_step")

    def __init__(self, step: Step) -> None:
        self._step, self._done = step, 0

    @property
    def start(self) -> int:
        """Position in the sequence at which the next piece begins."""
        return self._step.start + self._done

    @property
    def remaining(self) -> int:
        return len(self._step.token_ids) - self._done

    @property
    def wanted(self) -> int:
        """Rows that the last piece returns."""
        return self._step.num_logits

    def put_before(self, token_ids: Sequence[int]) -> None:
        """Run `token_ids`, the ones before `start`, ahead of what remains."""
        start, rest = self.start - len(token_ids), self._step.token_ids[self._done :]
        self._step = self._step._replace(start=start, token_ids=[*token_ids, *rest])
        self._done = 0

    def take(self, count: int) -> Step:
        """Take the next `count` tokens as a step, which returns rows only if it is the last."""
        step, first, end = self._step, self._done, self._done + count
        self._done = end
        if count == len(step.token_ids):
            return step
        piece = step._replace(start=step.start + first, token_ids=step.token_ids[first:end])
        total = len(step.token_ids)
        if step.num_hidden is not None:  # those of its own tokens that are among the last
            piece = piece._replace(num_hidden=max(0, end - max(first, total - step.num_hidden)))
        return piece if end == total else piece._replace(num_logits=0, parents=())


def allot(work: Iterable[Pieces], budget: StepBudget) -> list[int]:
    """Return how many tokens of each piece of work run in this step; 0 leaves it for the next.

    `work` is in order of arrival. Cuts never separate wanted rows. The first piece of work always
    runs, so that every step makes progress.
    """
    work = list(work)
    counts = [0] * len(work)
    # Work with nothing to cut off (a round of many drafts) is short whatever its size.
    long = [i for i, p in enumerate(work) if p.remaining > max(budget.short, p.wanted)]
    left = budget.max_tokens - (budget.reserved if long else 0)
    for index, pieces in enumerate(work):
        if index not in long and (pieces.remaining <= left or index == 0):
            counts[index] = pieces.remaining
            left -= pieces.remaining
    left = min(budget.prefill_chunk, left + budget.reserved)
    for index in long:
        remaining, wanted = work[index].remaining, work[index].wanted
        count = min(left, remaining)
        if count < remaining:
            count = min(count, remaining - wanted)
        if count > 0:
            counts[index] = count
            left -= count
    return counts
