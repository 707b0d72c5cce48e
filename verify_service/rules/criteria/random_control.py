"""The control: accept mismatches at random, regardless of the models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flyspec.engine.sampling import ACCEPT_STREAM, uniform
from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Random(Criterion):
    """Accepts a mismatch with a given probability: if u < p, u uniform, keyed by seed and position.

    The baseline of Fuzzy Speculative Decoding, appendix E, which a worthwhile rule must beat. Its
    released code tests every draft: `judges_matches`.
    """

    probability: float
    judges_matches: bool = False

    def measure(self, at: Evidence) -> Tensor:
        """Return the random number, float64 in (0, 1); per position the same for all drafters."""
        return uniform(at.positions, at.seed, ACCEPT_STREAM, at.raw.device)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] < self.probability


def random_control(rule: Rule) -> Criterion:
    probability, judges_matches = rule.random_acceptance, bool(rule.random_judges_matches)
    if not probability and not judges_matches:
        return Constant(False)
    return Random(probability or 0.0, judges_matches)
