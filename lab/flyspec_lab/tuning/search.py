"""Chooses among rules and thresholds, by what a replay says of them, and certifies thresholds.

A certificate promises that harmful flips are at most so frequent, with a stated confidence: Learn
then Test (arXiv 2110.01052) with fixed sequence testing. Thresholds are tested from the strictest
on, each with the exact binomial p-value of "its rate exceeds the limit", and the first that is not
rejected ends the sequence. The chance that a certified threshold breaks the promise is then at most
1 - confidence, for any number of thresholds, in finite samples, if later prompts are drawn like
these. Rates need not rise with the threshold; if they do, nothing is lost by stopping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, gamma

from flyspec.progress import progress
from flyspec.rules import Divergence, Rule
from flyspec_lab.tuning.replay import Replayed, RuleReplay


@dataclass(frozen=True)
class Axis:
    """A rule's threshold and its values, the strictest first."""

    name: str
    rule: Rule
    parameter: str
    values: Sequence[float]

    def at(self, value: float) -> Rule:
        # The parameters' types are known by name only.
        changes: dict[str, Any] = {self.parameter: value}
        return replace(self.rule, **changes)


def _fuzzy(divergence: Divergence, values: Sequence[float]) -> Axis:
    rule = Rule("fuzzy", divergence=divergence)
    return Axis(f"fuzzy, {divergence.name}", rule, "divergence_threshold", values)


# fmt: off
AXES: tuple[Axis, ...] = (
    Axis("fly", Rule("fly"), "fly_entropy_threshold", (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1)),
    Axis("margin", Rule("margin"), "margin_threshold", (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)),
    _fuzzy(Divergence.JS, (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3)),
    _fuzzy(Divergence.TV, (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55)),
    Axis("kl", Rule("kl"), "divergence_threshold", (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)),
    Axis("typical", Rule("typical", typical_delta=1.0), "typical_epsilon",
         (0.3, 0.2, 0.14, 0.09, 0.06, 0.03)),
    Axis("relaxed", Rule("relaxed"), "relaxed_ratio", (0.95, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2, 0.1)),
    Axis("mars", Rule("mars"), "mars_ratio", (0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7)),
)
# fmt: on
"""Parameters that are searched. Others are the presets' own, but for `typical`, whose δ would keep
the probabilities that it accepts below 0.3 of the entropy's bound."""


@dataclass(frozen=True)
class RuleCandidate:
    """A rule with a threshold; `axis` and `value` are empty for exact decoding.

    `recovery_low` is the lower bound of the recovery at the search's confidence, or that of a
    stricter threshold if it is lower: a looser one is no safer, only luckier.
    """

    axis: str
    value: float | None
    replayed: Replayed
    recovery_low: float

    @property
    def num_flips(self) -> int:
        """Texts whose right answer an accepted mismatch takes away."""
        return int(self.replayed.flips.sum())


def recovery_low(replayed: Replayed, confidence: float) -> float:
    """Return a lower bound of the recovery.

    Losses are taken for a Poisson process of events as large as the mean loss, or as one answer if
    there was none: the bound on their number is exact (Garwood, Biometrika 28, 1936), and holds
    where nothing was lost, unlike a bootstrap's. Answers gained do not count.
    """
    losses = -np.minimum(replayed.changes, 0.0)
    events = np.count_nonzero(losses)
    size = losses.sum() / events if events else 1.0
    bound = size * gamma.ppf(confidence, events + 1)
    return max(0.0, 1.0 - float(bound / replayed.scores.sum()))


def candidates(replay: RuleReplay, axes: Sequence[Axis], confidence: float) -> list[RuleCandidate]:
    """Replay exact decoding and every threshold of every axis."""
    found = [RuleCandidate("exact", None, replay.by(Rule("exact")), 1.0)]
    with progress("replaying", sum(len(axis.values) for axis in axes)) as advance:
        for axis in axes:
            low = 1.0
            for value in axis.values:
                replayed = replay.by(axis.at(value))
                low = min(low, recovery_low(replayed, confidence))
                found.append(RuleCandidate(axis.name, value, replayed, low))
                advance()
    return found


def fastest(found: Sequence[RuleCandidate], target_recovery: float) -> RuleCandidate:
    """Return the candidate with most tokens a round among those whose bound reaches the target."""
    good = [c for c in found if c.value is None or c.recovery_low >= target_recovery]
    return max(good, key=lambda c: c.replayed.tokens_per_round)


# --- certificates ------------------------------------------------------------------------------


Flips = NDArray[np.bool_]
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
        promise = self.promise
        if self.index is not None:
            return ""
        return (
            f"the strictest threshold flips {self.num_flips} of {self.num_prompts} prompts; a rate "
            f"of at most {promise.max_rate:.2%} with confidence {promise.confidence:.0%} needs at "
            f"least {promise.min_prompts}, even if none flips; record more, or allow a higher rate"
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


def certified(
    found: Sequence[RuleCandidate], axes: Sequence[Axis], promise: Promise
) -> dict[str, tuple[RuleCandidate | None, Certificate]]:
    """Return the loosest certified threshold of each axis by its name, with its certificate.

    All certificates hold together (`Promise.shared`), for the right answers of the target.
    """
    share, right = promise.shared(len(axes)), found[0].replayed.scores >= 1.0
    results: dict[str, tuple[RuleCandidate | None, Certificate]] = {}
    for axis in axes:
        own = [c for c in found if c.axis == axis.name]
        certificate = certify(np.stack([c.replayed.flips[right] for c in own], axis=1), share)
        chosen = None if certificate.index is None else own[certificate.index]
        results[axis.name] = chosen, certificate
    return results
