"""Thresholds with a promise: harmful flips are at most so frequent, with a stated confidence.

Learn then Test (arXiv 2110.01052) with fixed sequence testing: thresholds are tested from the
strictest on, each with the exact binomial p-value of "its rate exceeds the limit", and the first
that is not rejected ends the sequence. The chance that a certified threshold breaks the promise is
then at most 1 - confidence, for any number of thresholds, in finite samples, if later prompts are
drawn like these. Rates need not rise with the threshold; if they do, nothing is lost by stopping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

Flips = npt.NDArray[np.bool_]
"""[prompts, thresholds], strictest threshold first: whether a right answer became a wrong one."""


@dataclass(frozen=True)
class Promise:
    """At most this rate of harmful flips, with this confidence; both between 0 and 1."""

    max_rate: float
    confidence: float

    @property
    def risk(self) -> float:
        """Largest probability of breaking it (the paper's δ)."""
        return 1.0 - self.confidence

    @property
    def min_prompts(self) -> int:
        """Prompts without any flip that would suffice; with fewer, nothing can be certified."""
        return math.ceil(math.log(self.risk) / math.log1p(-self.max_rate))

    def shared(self, count: int) -> Promise:
        """Return the promise of each of `count` certificates, so that all hold together.

        The risk is divided equally among them (Bonferroni).
        """
        return replace(self, confidence=1.0 - self.risk / count)


@dataclass(frozen=True)
class Certificate:
    """The loosest threshold that keeps a promise, and its evidence.

    `index` is that of the threshold, None if not even the strictest one can be certified; then the
    evidence is the strictest one's. `p_value` is the test's, of at most `promise.risk` if passed.
    """

    promise: Promise
    index: int | None
    num_prompts: int
    num_flips: int
    p_value: float

    @property
    def problem(self) -> str:
        """Why nothing is certified, and what to change; empty if something is."""
        if self.index is not None:
            return ""
        promise = self.promise
        if self.num_prompts < promise.min_prompts:
            return (
                f"the sample is too small: {self.num_prompts} prompts, and a rate of at most "
                f"{promise.max_rate:.2%} with confidence {promise.confidence:.0%} needs at least "
                f"{promise.min_prompts}, none of them flipped; record more prompts"
            )
        return (
            f"the strictest threshold flips {self.num_flips} of {self.num_prompts} prompts, too "
            f"many for a rate of at most {promise.max_rate:.2%} with confidence "
            f"{promise.confidence:.0%}; allow a higher rate, or record more prompts"
        )


def p_values(flips: Flips, max_rate: float) -> npt.NDArray[np.float64]:
    """Return P(Bin(n, max_rate) <= flips) of each threshold."""
    values: npt.NDArray[np.float64] = binom.cdf(flips.sum(axis=0), len(flips), max_rate)
    return values


def certify(flips: Flips, promise: Promise) -> Certificate:
    """Return the certificate of the loosest threshold that fixed sequence testing reaches."""
    p = p_values(flips, promise.max_rate)
    failed = np.flatnonzero(p > promise.risk)
    passed = int(failed[0]) if failed.size else len(p)
    shown = max(0, passed - 1)
    return Certificate(
        promise=promise,
        index=passed - 1 if passed else None,
        num_prompts=len(flips),
        num_flips=int(flips[:, shown].sum()),
        p_value=float(p[shown]),
    )
