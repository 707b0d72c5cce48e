"""What the target's logits say about a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import process_logits
from flyspec.engine.model import History
from flyspec.engine.sampling import (
    SECOND_STREAM,
    TARGET_STREAM,
    checked,
    choose_processed,
    is_array,
)
from flyspec.values.tokens import SamplingParams
from verify_service.rules.criteria import Evidence
from verify_service.rules.presets import Composition
from verify_service.rules.readings import Column, Reading, read

Logits = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Round:
    """A round to judge: K drafted tokens up to their first EOS, and logits [K + 1, V].

    `start_position` is the absolute position of the first draft. `history` is the sequence before
    it, needed for penalties; `draft` holds the drafter's distributions, K rows.
    """

    drafts: Sequence[int]
    logits: Tensor
    sampling: SamplingParams
    seed: int
    start_position: int
    history: History | None = None
    draft: Distributions | None = None

    def processed(self) -> Tensor:
        """The logits that the target samples from, [K + 1, V]."""
        return process_logits(self.logits, self.sampling, self.history, self.drafts)

    def choose(self, processed: Tensor, first: int, stop: int, stream: int) -> Tensor:
        """Return the target's tokens at indices `first` to `stop` (exclusive): [stop - first]."""
        positions = range(self.start_position + first, self.start_position + stop)
        rows = processed[first:stop]
        return choose_processed(rows, self.sampling, positions, self.seed, stream)

    def evidence(self, processed: Tensor) -> Callable[[int, int], Evidence]:
        """Return a function from start and stop (exclusive) indices to the drafts' evidence."""

        @cache
        def at(start: int, stop: int) -> Evidence:
            return Evidence(
                self.logits[start:stop],
                processed[start:stop],
                self.drafts[start:stop],
                self.start_position + start,
                self.seed,
                self.draft and self.draft.rows(start, stop),
            )

        return at


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts about a round of K drafted tokens, by index from 0.

    `own` has the target's own token at each of the K + 1 positions; `matches` is in the rule's
    sense; `numbers` returns what the criterion measures at an index.
    """

    own: list[int]
    matches: list[bool]
    numbers: Reading
    _logits: Reading

    def gap(self, index: int) -> float:
        """Return raw logp(most likely) - logp(drafted), nats; infinite for probability 0."""
        most, drafted, _ = self._logits(index)
        return most - drafted

    def possible(self, index: int) -> bool:
        """Whether the drafted token's processed probability is not 0."""
        return self._logits(index)[2] != -math.inf


def observe(parts: Composition, round_: Round) -> Observed:
    """Read what the rule needs from a round."""
    drafts = round_.drafts
    width = len(drafts) + 1
    processed = round_.processed()
    samples = 1 if round_.sampling.greedy else parts.preset.samples
    streams = (TARGET_STREAM, SECOND_STREAM)[:samples]
    chosen = [round_.choose(processed, 0, width, stream) for stream in streams]
    evidence = round_.evidence(processed)
    columns: list[Column] = [lambda start, stop: _three_logits(evidence(start, stop))]
    if is_array(round_.logits) and is_array(processed):
        columns = [_from_arrays(round_.logits.numpy(), processed.numpy(), drafts)]
    criterion = parts.criterion
    if not (criterion.never or criterion.always):
        columns.append(lambda start, stop: criterion.measure(evidence(start, stop)))
    read_ids, readings = read(chosen, columns, len(drafts), round_.logits.device)
    ids = [checked(tokens) for tokens in read_ids]
    matches = [draft == token for draft, token in zip(drafts, ids[0], strict=False)]
    for tokens in ids[1:]:
        matches = [m or d == t for m, d, t in zip(matches, drafts, tokens, strict=False)]
    return Observed(
        own=ids[0],
        matches=matches,
        numbers=readings[-1],
        _logits=readings[0],
    )


def most_and_drafted(at: Evidence) -> Tensor:
    """Return the largest raw logit and the drafted token's, float64 [n, 2]; their gap is Δlogp."""
    drafted = at.raw.gather(-1, at.token_ids[:, None])
    return torch.cat([at.raw.amax(dim=-1, keepdim=True), drafted], dim=-1).to(torch.float64)


def _three_logits(at: Evidence) -> Tensor:
    """Return those two and the drafted token's processed logit, float64 [n, 3]."""
    processed = at.processed.gather(-1, at.token_ids[:, None])
    return torch.cat([most_and_drafted(at), processed.to(torch.float64)], dim=-1)


def _from_arrays(raw: Logits, processed: Logits, drafts: Sequence[int]) -> Column:
    """Like `_three_logits`, for arrays [K + 1, V], whose single numbers are far cheaper to read."""

    def column(start: int, stop: int) -> NDArray[np.float64]:
        rows = [
            (raw[i].max(), raw[i, draft], processed[i, draft])
            for i, draft in enumerate(drafts[start:stop], start)
        ]
        return np.array(rows, np.float64)

    return column
