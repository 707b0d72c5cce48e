"""Answers on a CPU, computed when asked for: single numbers are cheap, and most are not needed."""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.engine.logits import token_logprobs
from flyspec.engine.sampling import checked, is_array
from flyspec.values.tokens import TokenLogprobs
from verify_service.rules.criteria import Evidence
from verify_service.rules.inquiry import Inquiry, top_tokens
from verify_service.rules.observe import THREE_LOGITS


class LazyAnswers:
    """The answers to one inquiry. Raises what `process_logits` raises."""

    __slots__ = ("_evidence", "_found", "_inquiry", "_processed")

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._processed = inquiry.round.processed()
        self._found: dict[tuple[int, int], Sequence[float]] = {}
        self._evidence: dict[int, Evidence] = {}  # measures of an index share its tensors

    def tokens(self, stream: int, first: int, stop: int) -> list[int]:
        chosen = self._inquiry.round.choose(self._processed, first, stop, stream)
        return checked(chosen.tolist())

    def numbers(self, which: int, index: int) -> Sequence[float]:
        found = self._found.get((which, index))
        if found is None:
            found = self._found[which, index] = self._measure(which, index)
        return found

    def logprobs(self, first: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        rows = self._inquiry.round.logits[first : first + len(token_ids)]
        return token_logprobs(rows, token_ids, self._inquiry.top_logprobs or 0)

    def top_tokens(self) -> list[int]:
        top: list[int] = top_tokens(self._inquiry.round.logits, self._inquiry).flatten().tolist()
        return top

    def _measure(self, which: int, index: int) -> Sequence[float]:
        round_, processed = self._inquiry.round, self._processed
        measure = self._inquiry.measures[which]
        if measure is THREE_LOGITS and is_array(round_.logits) and is_array(processed):
            # Far cheaper than through tensors.
            raw, draft = round_.logits.numpy()[index], round_.drafts[index]
            return float(raw.max()), float(raw[draft]), float(processed.numpy()[index, draft])
        if index not in self._evidence:
            self._evidence[index] = round_.evidence(processed, index, index + 1)
        numbers: list[float] = measure.measure(self._evidence[index])[0].tolist()
        return numbers
