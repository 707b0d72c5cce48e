"""Judging in two halves: what a round asks about its logits, and its verdict from the answers.

The first half reads nothing, so that the questions of many rounds can be answered in one pass over
a device (`batch_pass`); the second half has only plain numbers to decide on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import process_logits
from flyspec.engine.model import History
from flyspec.engine.sampling import TARGET_STREAM, choose_processed
from flyspec.values.rounds import Verdict
from flyspec.values.tokens import SamplingParams, TokenLogprobs
from verify_service.rules.criteria import Evidence, Measure


class Round(NamedTuple):
    """A round to judge: K drafted tokens up to their first EOS, and logits [K + 1, V].

    `start_position` is the absolute position of the first draft. `history` is the sequence before
    it, needed for penalties; `draft` holds the drafter's distributions, K rows; `hidden` [K, hidden
    size] the target's hidden rows after each draft, if the rule reads them.
    """

    drafts: Sequence[int]
    logits: Tensor
    sampling: SamplingParams
    seed: int
    start_position: int
    history: History | None = None
    draft: Distributions | None = None
    hidden: Tensor | None = None

    def processed(self) -> Tensor:
        """The logits that the target samples from, [K + 1, V]."""
        return process_logits(self.logits, self.sampling, self.history, self.drafts)

    def choose(self, processed: Tensor, first: int, stop: int, stream: int) -> Tensor:
        """Return the target's tokens at indices `first` to `stop` (exclusive): [stop - first]."""
        positions = range(self.start_position + first, self.start_position + stop)
        rows = processed[first:stop]
        return choose_processed(rows, self.sampling, positions, self.seed, stream)

    def evidence(self, processed: Tensor, start: int, stop: int) -> Evidence:
        """Return the evidence on the drafts at indices `start` to `stop` (exclusive)."""
        return Evidence(
            self.logits[start:stop],
            processed[start:stop],
            self.drafts[start:stop],
            range(self.start_position + start, self.start_position + stop),
            self.seed,
            self.draft and self.draft.rows(start, stop),
            None if self.hidden is None else self.hidden[start:stop],
        )


class Inquiry(NamedTuple):
    """Questions about a round's logits.

    `streams` are those of the target's own tokens at all K + 1 indices, `measures` are of the K
    drafts. With `top_logprobs`, log-probabilities may be asked for, with so many likely tokens;
    with `num_top_tokens`, so many likely tokens of all rows.
    """

    round: Round
    streams: Sequence[int]
    measures: Sequence[Measure]
    top_logprobs: int | None = None
    num_top_tokens: int = 0


def top_tokens(logits: Tensor, inquiry: Inquiry) -> Tensor:
    """Return the most likely tokens of raw logits [K + 1, V]: [K + 1, num_top_tokens]."""
    return logits.topk(min(inquiry.num_top_tokens, logits.shape[1]), dim=-1).indices


class Answers(Protocol):
    """The answers to one inquiry, by index from 0."""

    def tokens(self, stream: int, first: int, stop: int) -> list[int]:
        """Return the target's own tokens from one of the streams, up to `stop` (exclusive).

        Raises `FloatingPointError` where logits are not finite.
        """

    def numbers(self, measure: Measure, index: int) -> Sequence[float]:
        """Return what one of the inquiry's measures finds at a draft."""

    def logprobs(self, first: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Return the log-probabilities of one token per row, from row `first` on.

        A row's token is its draft, the target's own, or the one that replaces a rejected draft.
        """

    def top_tokens(self) -> list[int]:
        """Return the most likely tokens by raw logits, row by row, most likely first."""


class PendingVerdict(NamedTuple):
    """A round whose verdict awaits answers.

    `decide` raises `FloatingPointError` if logits are not finite where a token is chosen.
    """

    inquiry: Inquiry
    decide: Callable[[Answers], Verdict]


class ThreeLogits(Measure):
    """The largest raw logit, the drafted token's, and its processed one."""

    def measure(self, at: Evidence) -> Tensor:
        """Return them, float64 [n, 3]; the gap of the first two is Δlogp."""
        token_ids = at.token_ids[:, None]
        logits = (
            at.raw.amax(dim=-1, keepdim=True),
            at.raw.gather(-1, token_ids),
            at.processed.gather(-1, token_ids),
        )
        return torch.cat([logit.to(torch.float64) for logit in logits], dim=-1)


THREE_LOGITS = ThreeLogits()


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts about a round of K drafted tokens, by index from 0.

    `own` has the target's own token at each of the K + 1 positions; `matches` is in the sense of
    each position's rule.
    """

    own: list[int]
    matches: list[bool]
    answers: Answers

    def gap(self, index: int) -> float:
        """Return raw logp(most likely) - logp(drafted), nats; infinite for probability 0."""
        most, drafted, _ = self.answers.numbers(THREE_LOGITS, index)
        return most - drafted

    def possible(self, index: int) -> bool:
        """True if the drafted token's processed probability is not 0."""
        return self.answers.numbers(THREE_LOGITS, index)[2] != -math.inf


def observe(inquiry: Inquiry, answers: Answers, samples: Sequence[int]) -> Observed:
    """Return the facts that the answers to an inquiry give.

    `samples` is how many of the target's samples a draft may match, for each draft.
    """
    drafts = inquiry.round.drafts
    width = len(drafts) + 1
    own = answers.tokens(TARGET_STREAM, 0, width)
    matches = [draft == token for draft, token in zip(drafts, own, strict=False)]
    for number, stream in enumerate(inquiry.streams[1:], 2):
        tokens = answers.tokens(stream, 0, width)
        matches = [
            m or (d == t and count >= number)
            for m, d, t, count in zip(matches, drafts, tokens, samples, strict=False)
        ]
    return Observed(own, matches, answers)
