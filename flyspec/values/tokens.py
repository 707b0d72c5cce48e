"""Tokens and how they are chosen: origins, sampling parameters, distributions, log-probabilities.

Positions are absolute (prompt included), costs are in nats. The enums of `flyspec.values` have the
numbers of their namesakes in `protos/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Origin(IntEnum):
    """Where an emitted token came from (DESIGN: origins)."""

    EXACT_MODEL = 1
    EXACT_LOOKUP = 2
    LOOSE = 3
    CORRECTION = 4
    BONUS = 5
    PLAIN = 6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from logits (see the proto message of this name).

    `temperature` 0 is greedy; `top_k` 0 keeps all; `logit_bias` is sorted by token id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether a token's logit depends on what stands before it: `penalizes` or `min_tokens`."""
        return self.penalizes or self.min_tokens > 0


class TokenDistribution(NamedTuple):
    """A drafter's distribution at one position, as it travels.

    `log_probs` are little-endian half floats: one a token of the vocabulary, or one for each of
    `token_ids`. Empty: all of the probability is on the drafted token.
    """

    log_probs: bytes = b""
    token_ids: tuple[int, ...] = ()


class Drafted(NamedTuple):
    """Drafted tokens, in order, and where each came from.

    `distributions` has one a token if they were asked for.
    """

    token_ids: Sequence[int]
    origins: Sequence[Origin] = ()
    distributions: Sequence[TokenDistribution] = ()


class TokenLogprobs(NamedTuple):
    """The target's raw log-probabilities at one position: the token's, and the most likely ones."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
