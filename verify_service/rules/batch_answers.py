"""One round's answers from tables that many rounds share."""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.engine.logits import logprobs_in
from flyspec.engine.sampling import TARGET_STREAM, checked
from flyspec.values.tokens import TokenLogprobs
from verify_service.rules.criteria import Measure
from verify_service.rules.inquiry import Inquiry
from verify_service.rules.readings import Reading

_DRAFTED, _OWN, _CORRECTED = range(3)
MOST_CORRECTIONS = 2
"""Tokens that may replace a rejected draft, besides the target's own."""
_COLUMNS = _CORRECTED + MOST_CORRECTIONS


class BatchAnswers:
    """The answers to one inquiry, as `Answers`.

    For each stream and each measure there is a table and the round's first row in it. The table of
    log-probabilities is of these tokens per row: the draft, the target's own, and those that would
    replace a rejected draft, as the measure `correction` draws them.
    """

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self.tokens_at: dict[int, tuple[Reading, int]] = {}
        self.numbers_at: dict[Measure, tuple[Reading, int]] = {}
        self.logprobs_at: tuple[Reading, int] | None = None
        self.top_tokens_at: Reading | None = None
        self.correction: Measure | None = None

    def tokens(self, stream: int, first: int, stop: int) -> list[int]:
        return checked([self._token(stream, index) for index in range(first, stop)])

    def numbers(self, which: int, index: int) -> Sequence[float]:
        reading, row = self.numbers_at[self._inquiry.measures[which]]
        return reading(row + index)

    def logprobs(self, first: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        assert self.logprobs_at is not None, "asked for in the inquiry"
        reading, row = self.logprobs_at
        top = self._inquiry.top_logprobs or 0
        return [
            logprobs_in(reading(row + index), self._column(index, token), _COLUMNS, top)
            for index, token in enumerate(token_ids, first)
        ]

    def top_tokens(self) -> list[int]:
        assert self.top_tokens_at is not None, "asked for in the inquiry"
        rows = range(len(self._inquiry.round.logits))
        return [int(token) for row in rows for token in self.top_tokens_at(row)]

    def _token(self, stream: int, index: int) -> float:
        reading, row = self.tokens_at[stream]
        return reading(row + index)[0]

    def _column(self, index: int, token_id: int) -> int:
        drafts = self._inquiry.round.drafts
        if index < len(drafts) and drafts[index] == token_id:
            return _DRAFTED
        if self._token(TARGET_STREAM, index) == token_id:
            return _OWN
        assert self.correction is not None, "no other token replaces a draft"
        reading, row = self.numbers_at[self.correction]
        return _CORRECTED + list(reading(row + index)).index(token_id)
