"""Are certificates kept? Certified anew from samples of a record, whose rates are known.

A certificate promises that at most a share δ of samples leads to a threshold whose rate is above
the limit. That rate is the population's from which the samples come, which for a user's prompts
nobody knows. But a record is a population, too, and its rates can be counted: samples are drawn
from it and certified, and those have broken the promise whose threshold flips too many of *all* its
prompts. A sample that certifies nothing promises nothing, and counts as kept.

Samples are drawn in two ways. A *half* is drawn without replacement, which leaves another half that
took no part. Whether the rate of that one is above the limit is no measure of the promise: a
threshold that keeps it barely is above it in nearly every second half, by chance, and what one half
has too few of, the other has too many. The mean rate of the other halves is an unbiased estimate of
the rate of new prompts. A half is also more like the whole than a sample is like its population, so
that halves break a promise far less often than δ allows: of 2,000 prompts of which 41 flip, 1.3 %
of halves certify a rate of at most 2 % with confidence 90 % (by the hypergeometric distribution). A
*redraw* is drawn with replacement, as large as the record. That is the law which the certificate
supposes, and its test is the sharp one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flyspec.errors import InvalidArgumentError
from flyspec_lab.certify import Flips, Promise, certify
from flyspec_lab.statistics import exact_interval

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BrokenPromises:
    """Of `draws` samples, `certified` some threshold, and `broken` the promise by it.

    `share` is broken / draws, to which the promise allows `risk` (δ); `low` and `high` are its
    exact 95 % interval: given the record, draws are independent.
    """

    draws: int
    certified: int
    broken: int
    share: float
    low: float
    high: float
    risk: float

    @classmethod
    def of(cls, certified: Bools, broken: Bools, risk: float) -> BrokenPromises:
        """Count them, given whether each sample did [draws]."""
        draws, count = len(broken), int(broken.sum())
        interval = exact_interval(count, draws)
        return cls(draws, int(certified.sum()), count, count / draws, *interval, risk)


@dataclass(frozen=True)
class RuleResplits:
    """One rule's certificates, each with its part of the risk.

    `above` counts its thresholds whose rate over the record is above the limit: without any, no
    sample can break the promise. `held_out_rate` is the mean rate of flips of the other halves
    under the thresholds certified, None if none was; `held_out_above` counts those whose own rate
    is above the limit.
    """

    above: int
    halves: BrokenPromises
    redraws: BrokenPromises
    held_out_rate: float | None
    held_out_above: int


@dataclass(frozen=True)
class Resplits:
    """The certificates of all rules together: a sample breaks the promise if any of them does.

    `num_prompts` are the record's, and `half_size` those of a half that certifies.
    """

    promise: Promise
    num_prompts: int
    half_size: int
    halves: BrokenPromises
    redraws: BrokenPromises
    rules: Mapping[str, RuleResplits]


def samples_of(num_prompts: int, draws: int, seed: int) -> Iterator[tuple[Indices, ...]]:
    """Yield the indices of a half, of the other half, and of a redraw, `draws` times."""
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        half, rest = np.split(rng.permutation(num_prompts), [num_prompts // 2])
        yield half, rest, rng.integers(num_prompts, size=num_prompts)


def resplit(flips: Mapping[str, Flips], promise: Promise, draws: int, seed: int = 0) -> Resplits:
    """Certify from `draws` halves and redraws, and count the promises broken.

    `flips` has those of each rule on the same prompts; all certificates of a sample hold together
    (`Promise.shared`). Raises `InvalidArgumentError` if there are fewer than two prompts.
    """
    (num_prompts,) = {len(table) for table in flips.values()}
    if num_prompts < 2:
        raise InvalidArgumentError(f"{num_prompts} prompts cannot be halved; record more")
    share = promise.shared(len(flips))
    samples = list(samples_of(num_prompts, draws, seed))
    halves, redraws, rules = [], [], {}
    for name, table in flips.items():
        above = table.mean(axis=0) > promise.max_rate
        indices = [certify(table[half], share).index for half, _, _ in samples]
        halves.append(_outcome(indices, above))
        redraws.append(_outcome([certify(table[r], share).index for *_, r in samples], above))
        held_out = [
            float(table[rest, index].mean())
            for (_, rest, _), index in zip(samples, indices, strict=True)
            if index is not None
        ]
        rules[name] = RuleResplits(
            int(above.sum()),
            BrokenPromises.of(*halves[-1], share.risk),
            BrokenPromises.of(*redraws[-1], share.risk),
            float(np.mean(held_out)) if held_out else None,
            sum(rate > promise.max_rate for rate in held_out),
        )
    of_halves, of_redraws = (_together(outcomes, promise.risk) for outcomes in (halves, redraws))
    return Resplits(promise, num_prompts, num_prompts // 2, of_halves, of_redraws, rules)


def _together(outcomes: Sequence[tuple[Bools, Bools]], risk: float) -> BrokenPromises:
    certified, broken = np.any(outcomes, axis=0)
    return BrokenPromises.of(certified, broken, risk)


def _outcome(indices: Sequence[int | None], above: Bools) -> tuple[Bools, Bools]:
    """Return whether each sample certified a threshold, and whether one whose rate is `above`."""
    certified = np.array([index is not None for index in indices])
    broken = np.array([index is not None and bool(above[index]) for index in indices])
    return certified, broken
