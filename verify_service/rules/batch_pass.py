"""One pass over the logits of many rounds on a device: queues everything, then reads all at once.

Each round's answers are in the tables that all of them share, once these are read: the only place
of judging that waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyspec.engine.batched_logits import RowSampling, draw_rows, joined, truncates, warp_rows
from flyspec.engine.logits import adjust, adjusts, computable, logprob_table, logprobs_in
from flyspec.engine.sampling import TARGET_STREAM, checked, likeliest, row_keys
from flyspec.engine.upload import upload
from flyspec.values.tokens import TokenLogprobs
from verify_service.rules.criteria import Evidence, Measure
from verify_service.rules.inquiry import Inquiry, top_tokens
from verify_service.rules.speculative_sampling import Correction

_DRAFTED, _OWN, _CORRECTED = range(3)
MOST_CORRECTIONS = 2
"""Tokens that may replace a rejected draft, besides the target's own."""
_COLUMNS = _CORRECTED + MOST_CORRECTIONS
MOST_LOGITS = 1 << 24
"""Maximum logits per pass, unless a single round has more. Noise and sorting take up to 32 bytes
for each, and models and their caches leave little memory."""

Reading = Callable[[int], Sequence[float]]
"""Numbers of one row of a table."""


def read(tables: Sequence[Tensor]) -> list[float]:
    """Return the numbers of all tables, one after the other, in one transfer.

    Token ids and numbers of every floating type are exact in the float64 that is read.
    """
    numbers: list[float] = torch.cat([t.to(torch.float64).flatten() for t in tables]).tolist()
    return numbers


class Readings:
    """Tables on a device, [rows, numbers] each, that are read together."""

    def __init__(self) -> None:
        self._tables: list[Tensor] = []
        self._size = 0
        self._numbers: list[float] = []

    def add(self, table: Tensor) -> Reading:
        """Return the table's reading, for use after `read`."""
        begin, width = self._size, table.shape[1]
        self._tables.append(table)
        self._size += table.numel()
        return lambda row: self._numbers[begin + row * width : begin + (row + 1) * width]

    def read(self) -> None:
        if self._tables:
            self._numbers = read(self._tables)


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

    def numbers(self, measure: Measure, index: int) -> Sequence[float]:
        reading, row = self.numbers_at[measure]
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


class BatchPass:
    """Answers the inquiries of rounds that agree in `kind`.

    `found` has each one's answers, for use once the readings are read, or the error that it alone
    fails with.
    """

    def __init__(self, inquiries: Sequence[Inquiry], readings: Readings) -> None:
        self._inquiries, self._readings = inquiries, readings
        self._rounds = [inquiry.round for inquiry in inquiries]
        self._answers = [BatchAnswers(inquiry) for inquiry in inquiries]
        self.found: list[BatchAnswers | Exception] = [*self._answers]
        self._joined, self._rows_of = cache(self._join), cache(self._find_rows)
        self._raw, self._firsts = joined([round_.logits for round_ in self._rounds])
        scores = self._raw
        if adjusts(self._rounds[0].sampling):
            scores = torch.cat([self._adjusted(which) for which in range(len(inquiries))])
        self._greedy = self._rounds[0].sampling.greedy
        self._processed = scores if self._greedy else self._warped(scores)

    @staticmethod
    def kind(inquiry: Inquiry) -> object:
        """Return what has to be the same for all rounds of a pass, besides the device."""
        sampling, logits = inquiry.round.sampling, inquiry.round.logits
        return adjusts(sampling), sampling.greedy, logits.shape[1], logits.dtype

    def run(self) -> None:
        """Queue everything, and add it to the readings."""
        own = self._choose()
        self._add_logprobs(own, self._measure())
        for inquiry, answers in zip(self._inquiries, self._answers, strict=True):
            if inquiry.num_top_tokens:
                answers.top_tokens_at = self._readings.add(
                    top_tokens(inquiry.round.logits, inquiry)
                )

    def _adjusted(self, which: int) -> Tensor:
        round_ = self._rounds[which]
        try:
            return adjust(round_.logits, round_.sampling, round_.history, round_.drafts)
        except Exception as error:
            self.found[which] = error
            return computable(round_.logits)

    def _warped(self, scores: Tensor) -> Tensor:
        rows = [round_.sampling for round_ in self._rounds for _ in range(len(round_.logits))]
        sampling = RowSampling.of(rows, scores.device)
        return warp_rows(scores, sampling, any(map(truncates, rows)))

    def _find_rows(self, which: tuple[int, ...]) -> Tensor | None:
        """Return the indices of some rounds' rows, int64; None for those of all rounds."""
        if len(which) == len(self._rounds):
            return None
        firsts = self._firsts
        rows = [firsts[i] + row for i in which for row in range(len(self._rounds[i].logits))]
        return upload(torch.tensor(rows), self._raw.device)

    def _join(self, which: tuple[int, ...]) -> tuple[Evidence, list[int]]:
        """Return the evidence on all rows of some rounds, and the first row of each.

        A row without a draft has token 0, and hidden numbers of 0.
        """
        raw, processed, firsts = self._raw, self._processed, self._firsts
        rounds = [self._rounds[i] for i in which]
        rows = self._rows_of(which)
        if rows is not None:
            processed = processed.index_select(0, rows)
            raw = processed if self._processed is raw else raw.index_select(0, rows)
            firsts = [0, *accumulate(len(round_.logits) for round_ in rounds)][:-1]
        drafts, positions, seeds = [0] * len(raw), [0] * len(raw), [0] * len(raw)
        for round_, first in zip(rounds, firsts, strict=True):
            start, width = round_.start_position, len(round_.logits)
            drafts[first : first + width - 1] = round_.drafts
            positions[first : first + width] = range(start, start + width)
            seeds[first : first + width] = [round_.seed] * width
        after = [round_.hidden for round_ in rounds if round_.hidden is not None]
        hidden = None
        if after and len(after) == len(rounds):
            hidden = torch.cat([pad(each, (0, 0, 0, 1)) for each in after])
        return Evidence(raw, processed, drafts, positions, seeds, hidden=hidden), firsts

    def _choose(self) -> Tensor:
        """Choose all rounds' tokens from each of their streams; return those of `TARGET_STREAM`."""
        asking: dict[int, list[int]] = {}
        for which, inquiry in enumerate(self._inquiries):
            for stream in inquiry.streams:
                asking.setdefault(stream, []).append(which)
        chosen: dict[int, Tensor] = {}
        for stream, members in asking.items():
            at, firsts = self._joined(tuple(members))
            if self._greedy:
                chosen[stream] = likeliest(at.processed)
            else:
                keys = torch.tensor(row_keys(at.seed, at.positions, stream))
                keys = upload(keys, at.raw.device)
                greedy = torch.zeros_like(keys, dtype=torch.bool)
                chosen[stream] = draw_rows(at.processed, keys, greedy)
            reading = self._readings.add(chosen[stream][:, None])
            for which, first in zip(members, firsts, strict=True):
                self._answers[which].tokens_at[stream] = reading, first
        return chosen[TARGET_STREAM]

    def _measure(self) -> dict[int, Tensor]:
        """Take all measures; return the corrections [K, c] of the rounds that draw some."""
        asking: dict[Measure, list[int]] = {}
        corrections: dict[int, Tensor] = {}
        for which, (inquiry, round_) in enumerate(zip(self._inquiries, self._rounds, strict=True)):
            for measure in inquiry.measures if round_.drafts else ():
                if not measure.needs_draft:
                    asking.setdefault(measure, []).append(which)
                    continue
                try:
                    table = self._alone(measure, which)
                except Exception as error:
                    self.found[which] = error
                    break
                if isinstance(measure, Correction):
                    corrections[which] = table
                    self._answers[which].correction = measure
                self._answers[which].numbers_at[measure] = self._readings.add(table), 0
        for measure, members in asking.items():
            at, firsts = self._joined(tuple(members))
            reading = self._readings.add(measure.measure(at))
            for which, first in zip(members, firsts, strict=True):
                self._answers[which].numbers_at[measure] = reading, first
        return corrections

    def _alone(self, measure: Measure, which: int) -> Tensor:
        round_, first = self._rounds[which], self._firsts[which]
        processed = self._processed[first : first + len(round_.logits)]
        return measure.measure(round_.evidence(processed, 0, len(round_.drafts)))

    def _add_logprobs(self, own: Tensor, corrections: dict[int, Tensor]) -> None:
        """Add those of all tokens that may be asked for, as the verdict decides on the rows."""
        tops = {i: each.top_logprobs for i, each in enumerate(self._inquiries)}
        wanted = {i: top for i, top in tops.items() if top is not None}
        if not wanted:
            return
        at, firsts = self._joined(tuple(wanted))
        rows = self._rows_of(tuple(wanted))
        own = own if rows is None else own.index_select(0, rows)
        corrected = torch.zeros(len(own), MOST_CORRECTIONS, dtype=own.dtype, device=own.device)
        for which, first in zip(wanted, firsts, strict=True):
            if which in corrections:
                table = corrections[which]
                corrected[first : first + len(table), : table.shape[1]] = table
        # Tokens of rows that are not finite are negative; nobody asks for those.
        columns = [at.token_ids[:, None], own[:, None], corrected]
        token_ids = torch.cat(columns, dim=-1).clamp_(min=0)
        reading = self._readings.add(logprob_table(at.raw, token_ids, max(wanted.values())))
        for which, first in zip(wanted, firsts, strict=True):
            self._answers[which].logprobs_at = reading, first
