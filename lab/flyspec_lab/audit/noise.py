"""Whether recorded numbers differ from a target's by more than rounding does.

Rounding differs between machines, and in half precision it is as large as what quantisation
changes in a number. But its size can be measured: by how far this machine's own numbers are from
those of the same weights in float32. Numbers of the same weights from elsewhere are as far off on
average; those of other weights are farther.
"""

from __future__ import annotations

from collections.abc import Sequence

FEWEST_NUMBERS = 16
"""Below this no sample of differences is significant enough."""
SIGNIFICANT = 1e-4
"""Chance of calling the same weights others, for one recording."""


def chance_of_rounding(
    recorded: Sequence[float], own: Sequence[float], reference: Sequence[float]
) -> float | None:
    """Return the chance that recorded numbers are as far from the reference if they were rounded
    like this machine's own; None for too few numbers.

    One-sided Wilcoxon signed-rank test of |recorded - reference| - |own - reference|.
    """
    from scipy.stats import wilcoxon

    distances = [(abs(a - c), abs(b - c)) for a, b, c in zip(recorded, own, reference, strict=True)]
    differences = [far - near for far, near in distances if far != near]
    if len(differences) < FEWEST_NUMBERS:
        return None
    return float(wilcoxon(differences, alternative="greater").pvalue)


def combined(chances: Sequence[float]) -> float | None:
    """Return the chance for several recordings together (Fisher's method); None without any."""
    from scipy.stats import combine_pvalues

    # 0 is below what a float can say.
    least = [max(chance, 1e-300) for chance in chances]
    return float(combine_pvalues(least, method="fisher").pvalue) if least else None
