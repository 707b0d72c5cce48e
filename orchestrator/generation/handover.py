"""Where a relay's head hands over to the draft service that goes on behind it.

A head feeds on its own rows and gets worse with every token, and even before that the draft
service's model may know better. Where both know better now and then, the relay accepts more tokens
than either; which one does at a place where the head is unsure, a sequence shows soon.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from flyspec.values.rounds import DraftChunk

MAX_BLOCK = 5
"""Most tokens of a head that a draft service extends: heads are trained on 3 to 8 steps."""
_CONFIDENCES = (0.5, 0.8)
"""Classes of the head's tokens, by its confidence. Those of the last one always stand."""


class _Place(NamedTuple):
    """A place at which the head handed over: what comes before, and what was guessed there."""

    start: int
    before: Sequence[int]
    kind: int
    of_head: int
    of_service: int


class Handover:
    """Whose token to draft where the head is unsure, in one sequence.

    That of the draft service, until the head's own would have been right more often in such places.
    """

    def __init__(self) -> None:
        self._ahead = [0] * len(_CONFIDENCES)  # by class: right tokens of the head, less the other
        self._place: _Place | None = None

    def kept(self, block: DraftChunk) -> DraftChunk:
        """Return the part of a head's block behind which the draft service is to go on."""
        for at, confidence in enumerate(block.confidences[:MAX_BLOCK]):
            kind = _kind(confidence)
            if kind < len(self._ahead) and self._ahead[kind] <= 0:
                return block.cut(0, at)
        return block.cut(0, MAX_BLOCK)

    def handed(self, block: DraftChunk, kept: DraftChunk, token_id: int) -> None:
        """Note what the draft service has at the place of the head's first token that is left out.

        `learn` compares both with the text.
        """
        at, self._place = len(kept.token_ids), None
        if at < len(block.token_ids) and (own := block.token_ids[at]) != token_id:
            kind = _kind(block.confidences[at])
            if kind < len(self._ahead):
                self._place = _Place(block.start_position, kept.token_ids, kind, own, token_id)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from how the sequence went on, if it did as far as the last place."""
        place, self._place = self._place, None
        if place is None:
            return
        end = place.start + len(place.before)
        if len(tokens) > end and list(tokens[place.start : end]) == list(place.before):
            right = tokens[end]
            self._ahead[place.kind] += (right == place.of_head) - (right == place.of_service)


def _kind(confidence: float) -> int:
    return bisect_right(_CONFIDENCES, confidence)
