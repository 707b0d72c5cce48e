"""The values that all parts of flyspec share: rules, sampling, verdicts, states. No I/O, no torch.

Positions are absolute (prompt included), costs are in nats. The enums have the numbers of their
namesakes in `protos/`, so that `wire` converts them by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

DEFAULT_NUM_SPECULATIVE_TOKENS = 15


class Origin(IntEnum):
    """Where an emitted token came from (DESIGN: origins)."""

    EXACT_MODEL = 1
    EXACT_LOOKUP = 2
    LOOSE = 3
    CORRECTION = 4
    BONUS = 5
    PLAIN = 6


class Outcome(IntEnum):
    """What a verdict says of one drafted token."""

    EXACT = 1
    LOOSE = 2
    PROVISIONAL = 3
    REJECTED = 4
    NOT_REACHED = 5

    @property
    def accepted(self) -> bool:
        """Whether the drafted token stands, if only for now."""
        return self <= Outcome.PROVISIONAL


class EntropyMeasure(IntEnum):
    """How the target's uncertainty is measured; the two differ by an order of magnitude."""

    NORMALIZED = 1
    TOP_K = 2


class WindowScope(IntEnum):
    """How far a window reaches."""

    WITHIN_ROUND = 1
    ACROSS_ROUNDS = 2


class Divergence(IntEnum):
    """How the target's distribution p and the draft's q are compared."""

    JS = 1
    KL = 2
    TV = 3


class FinishReason(IntEnum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2


class BreakerState(IntEnum):
    """Whether a service that failed is tried again."""

    CLOSED = 1
    OPEN = 2
    HALF_OPEN = 3


class DrafterState(IntEnum):
    """Where a drafter is in its life."""

    REGISTERED = 1
    CANARY = 2
    ACTIVE = 3
    DRAINING = 4


class RecoveryKind(IntEnum):
    """What kept a generation going when a service failed, or was taken from it."""

    TARGET_REOPENED = 1
    DRAFTER_REOPENED = 2
    DRAFTER_REPLACED = 3
    DRAFTER_FALLBACK = 4
    DRAFTER_RESTORED = 5
    DRAFTER_SWAPPED = 6


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


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule by preset name, with the parameters that differ from the preset.

    `None` takes the preset's value; `flyspec.validation.resolve_rule` fills them in.
    """

    name: str
    fly_window_size: int | None = None
    fly_entropy_threshold: float | None = None
    fly_entropy_top_k: int | None = None
    entropy_measure: EntropyMeasure | None = None
    window_scope: WindowScope | None = None
    margin_threshold: float | None = None
    divergence: Divergence | None = None
    divergence_threshold: float | None = None
    divergence_top_k: int | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    random_acceptance: float | None = None
    guarded_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still be accepted loosely; `None` is without bound."""

    loose_tokens: int | None = None
    loose_cost_nats: float | None = None


class Decision(NamedTuple):
    """What is said of one drafted token.

    `target_token_id` is the target's own token there. `entropy` is in the rule's measure and set
    where the rule looked, `measure` likewise for a rule that goes by something else; `gap_nats` =
    raw logp(most likely) - logp(drafted), set at mismatches. Of a token that was not reached,
    `target_token_id` may be missing.
    """

    outcome: Outcome
    target_token_id: int | None = None
    entropy: float | None = None
    gap_nats: float | None = None
    measure: float | None = None


class TokenDistribution(NamedTuple):
    """A drafter's distribution at one position, as it travels.

    `log_probs` are little-endian half floats: one a token of the vocabulary, or one for each of
    `token_ids`. Empty: all of the probability is on the drafted token.
    """

    log_probs: bytes = b""
    token_ids: tuple[int, ...] = ()


class TokenLogprobs(NamedTuple):
    """The target's raw log-probabilities at one position: the token's, and the most likely ones."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class OpenWindow(NamedTuple):
    """A loosely accepted token at absolute `position` whose window is not closed yet.

    `remaining_matches` >= 1 drafted positions must still match; if one does not, the sequence goes
    back to `position` and `target_token_id` takes the token's place.
    """

    position: int
    target_token_id: int
    remaining_matches: int
    gap_nats: float
    target_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of a round.

    `num_accepted` drafts stand, then comes `next_token_id` at absolute position `keep_length`. If
    the window that was open before the round failed, it is `failed_window`: no draft stands and
    `keep_length` is its position. `open_window` is open now.
    """

    num_accepted: int
    next_token_id: int
    decisions: tuple[Decision, ...] = ()
    keep_length: int = 0
    open_window: OpenWindow | None = None
    failed_window: OpenWindow | None = None

    @property
    def num_loose(self) -> int:
        """Tokens accepted although they differ from the target's own."""
        return sum(1 for d in self.decisions if d.outcome is Outcome.LOOSE)

    @property
    def loose_cost_nats(self) -> float:
        """What they cost together."""
        return sum(d.gap_nats or 0.0 for d in self.decisions if d.outcome is Outcome.LOOSE)
