"""The acceptance rules: names, parameters, presets. No I/O, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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


DEFAULT_NUM_SPECULATIVE_TOKENS = 15
