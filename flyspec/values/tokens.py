"""Tokens: origins, sampling parameters, distributions, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

from flyspec.flags import UINT32, Flag
from flyspec.ranges import Range

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0
MAX_TOP_LOGPROBS = 20
LOGIT_BIAS = Range(-100.0, 100.0)

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: as at OpenAI, this stands for a probability of 0."""


def json_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


sampling_flag = partial(Flag, group="Sampling")


class Origin(IntEnum):
    """Source of an emitted token."""

    EXACT_MODEL = 1
    EXACT_LOOKUP = 2
    LOOSE = 3
    CORRECTION = 4
    BONUS = 5
    PLAIN = 6
    PREDICTED = 7


LABELS: Mapping[Origin, str] = {
    Origin.EXACT_MODEL: "drafted by the model",
    Origin.EXACT_LOOKUP: "copied",
    Origin.PREDICTED: "predicted",
    Origin.LOOSE: "loosely accepted",
    Origin.CORRECTION: "corrected",
    Origin.BONUS: "bonus",
    Origin.PLAIN: "plain",
}
"""Names of the origins where users see them."""


def read_logit_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Parse ID=BIAS texts to sorted pairs. Raises `ValueError`."""
    biases: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise ValueError(
                f"{text!r}: must be a token id and a number, such as 42=-1.5"
            ) from None
        if number in biases:
            raise ValueError(f"{text!r}: token {number} is given twice")
        biases[number] = value
    return tuple(sorted(biases.items()))


# fmt: off
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of choosing tokens from logits (see the proto message of this name).

    `logit_bias` is sorted by token id.
    """

    temperature: Annotated[float, sampling_flag(
        f"Temperature: 0 (greedy decoding), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}.",
    )] = 0.0
    top_p: Annotated[float, sampling_flag(
        "Probability mass of nucleus sampling, above 0 and at most 1.", Range(0.0, 1.0, open=True),
    )] = 1.0
    top_k: Annotated[int, sampling_flag(
        "Sample from this many most likely tokens (0: all).",
        Range(0, 2**31 - 1, " (0 keeps every token)"),
    )] = 0
    min_p: Annotated[float, sampling_flag(
        "Drop tokens below this fraction of the most likely token's probability, 0 to 1.",
        Range(0.0, 1.0),
    )] = 0.0
    repetition_penalty: Annotated[float, sampling_flag(
        "Divide positive logits of tokens in the prompt or output by this and multiply negative "
        "ones; above 0 and at most 10.", Range(0.0, 10.0, open=True),
    )] = 1.0
    presence_penalty: Annotated[float, sampling_flag(
        "Subtract this from the logits of tokens in the output, -2 to 2.", Range(-2.0, 2.0),
    )] = 0.0
    frequency_penalty: Annotated[float, sampling_flag(
        "Subtract this once per occurrence of the token in the output, -2 to 2.", Range(-2.0, 2.0),
    )] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], sampling_flag(
        f"Add BIAS ({LOGIT_BIAS}) to the logit of token ID; repeatable.",
        metavar="ID=BIAS", read=read_logit_biases,
    )] = ()
    min_tokens: Annotated[int, sampling_flag(
        "Minimum output tokens before end of sequence; at most --max-tokens.", UINT32,
    )] = 0
    # fmt: on

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """True if logits depend on earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """True if logits depend on earlier tokens or their number."""
        return self.penalizes or self.min_tokens > 0


class TokenDistribution(NamedTuple):
    """A drafter's distribution at one position, as sent.

    `log_probs` are little-endian half floats: one per token of the vocabulary, or one for each of
    `token_ids`. Empty: the drafted token has probability 1.
    """

    log_probs: bytes = b""
    token_ids: tuple[int, ...] = ()


class Drafted(NamedTuple):
    """Drafted tokens, in order, with their origins.

    `distributions` has one per token if requested. `confidences` has, for each token, the largest
    probability of the distribution that the drafter chose it from; empty if unknown. So they depend
    on the tokens before it, never on the token itself: what is left out for them is no selection.
    With `parents` they are a tree (`flyspec.draft_trees`).
    """

    token_ids: Sequence[int]
    origins: Sequence[Origin] = ()
    distributions: Sequence[TokenDistribution] = ()
    confidences: Sequence[float] = ()
    parents: Sequence[int] = ()

    def joined(self, more: Drafted) -> Drafted:
        """Return these tokens and the next ones."""
        return Drafted(
            [*self.token_ids, *more.token_ids],
            [*self.origins, *more.origins],
            [*self.distributions, *more.distributions],
            [*self.confidences, *more.confidences],
        )

    def cut(self, count: int) -> Drafted:
        """Return only the first `count` tokens."""
        return Drafted(
            self.token_ids[:count],
            self.origins[:count],
            self.distributions[:count],
            self.confidences[:count],
        )


def still_needed(min_confidence: float, chances: Sequence[float]) -> float:
    """Return the minimum probability of the rest of a draw after tokens of these; above 1, it ends.

    Those of other services may be 0.
    """
    for chance in chances if min_confidence > 0 else ():
        min_confidence = min_confidence / chance if chance else math.inf
    return min_confidence


class TokenLogprobs(NamedTuple):
    """The target's raw log-probabilities at one position: the token's and the most likely ones.

    `token` and `top_tokens` are the bytes of these tokens; empty in the verify service's messages.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token: bytes = b""
    top_tokens: tuple[bytes, ...] = ()

    def spelled(self, token_id: int, bytes_of: Callable[[int], bytes]) -> TokenLogprobs:
        """Return these with the tokens' bytes, where `token_id` is the token at the position."""
        return self._replace(
            token=bytes_of(token_id), top_tokens=tuple(map(bytes_of, self.top_token_ids))
        )

    def document(self, token_id: int) -> dict[str, Any]:
        """Return an entry of OpenAI's `logprobs.content`, and the ids of the tokens.

        `token` has replacement characters where the bytes are no whole characters.
        """

        def entry(token: bytes, token_id: int, logprob: float) -> dict[str, Any]:
            return {
                "token": token.decode(errors="replace"),
                "token_id": token_id,
                "bytes": list(token),
                "logprob": json_logprob(logprob),
            }

        top = zip(self.top_tokens, self.top_token_ids, self.top_logprobs, strict=True)
        return {
            **entry(self.token, token_id, self.logprob),
            "top_logprobs": [entry(*each) for each in top],
        }
