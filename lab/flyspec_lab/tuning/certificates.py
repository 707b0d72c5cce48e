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
        """Reason why nothing is certified, with what to change; empty if something is."""
        promise, count = self.promise, self.num_prompts
        limit = f"a rate of at most {promise.max_rate:.2%} with confidence {promise.confidence:.0%}"
        if self.index is not None:
            return ""
        if count < promise.min_prompts:
            return (
                f"the sample is too small: {count} prompts, and {limit} needs at least "
                f"{promise.min_prompts}, none of them flipped; record more prompts"
            )
        return (
            f"the strictest threshold flips {self.num_flips} of {count} prompts, too many for "
            f"{limit}; allow a higher rate, or record more prompts"
        )


def certify(flips: Flips, promise: Promise) -> Certificate:
    """Return the certificate of the loosest threshold that fixed sequence testing reaches."""
    counts, size = flips.sum(axis=0), len(flips)
    p = binom.cdf(counts, size, promise.max_rate)
    failed = np.flatnonzero(p > promise.risk)
    passed = int(failed[0]) if failed.size else len(p)
    shown = max(0, passed - 1)
    index = passed - 1 if passed else None
    return Certificate(promise, index, size, int(counts[shown]), float(p[shown]))
