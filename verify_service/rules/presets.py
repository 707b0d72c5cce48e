"""From a rule's name and parameters to the parts that it is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flyspec.types import Rule
from flyspec.validation import resolve_rule
from verify_service.rules.criteria import Criterion
from verify_service.rules.criteria.entropy import entropy_criterion
from verify_service.rules.criteria.exact import Constant
from verify_service.rules.window import Window

REFERENCE_GATE_OFF = 0.01
"""The released code drops its gate at this threshold and below."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A rule in parts."""

    criterion: Criterion
    window: Window
    two_samples: bool = False


EXACT = Composition(Constant(False), Window(0, 0))


@lru_cache(maxsize=1024)
def compose(rule: Rule, num_draft_tokens: int) -> Composition:
    """The parts of a rule, for a round of K = `num_draft_tokens` up to its first EOS.

    `fly-reference` follows the authors' released code: its `win_len` W counts the mismatch itself,
    so W - 1 matches follow, yet the last W positions of a round are judged exactly; its gate sees
    raw logits and is off at θ <= 0.01; at temperature > 0 a match with either of two target samples
    counts. W = 0, which the code cannot run, accepts whatever passes the gate, as elsewhere.
    """
    resolved = resolve_rule(rule, num_draft_tokens)
    window = resolved.fly_window_size
    threshold = resolved.fly_entropy_threshold
    measure = resolved.entropy_measure
    if window is None or threshold is None or measure is None:
        return EXACT
    if rule.name == "fly-reference":
        if threshold <= REFERENCE_GATE_OFF:
            gate: Criterion = Constant(True, raw=True)
        else:
            gate = entropy_criterion(measure, threshold, resolved.fly_entropy_top_k, raw=True)
        return Composition(gate, Window(max(0, window - 1), window), two_samples=True)
    gate = entropy_criterion(measure, threshold, resolved.fly_entropy_top_k)
    return Composition(gate, Window(window, window))
