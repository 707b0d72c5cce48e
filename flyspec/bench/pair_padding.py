"""How many layers to add to a pair of models for a wanted ratio of their steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flyspec.errors import ConfigError

_PROBE_LAYERS = 8
"""Layers that are added to tell what one costs."""
_FAR = 2
"""Times as many layers, from which on the first guess is tried."""
MAX_LAYERS = 1024

Ratio = Callable[[int, int], Awaitable[float]]
"""A verify step over a draft step with so many layers more in the target and in the draft model."""


@dataclass(frozen=True)
class Padding:
    """Layers to add for `ratio`, and what they were worked out from.

    `own_ratio` is the pair's own, `probed_ratio` that with some layers more in the model that is
    padded. Ratios alone: a machine whose speed drifts slows both models of a round alike.
    """

    ratio: float
    target_layers: int
    draft_layers: int
    own_ratio: float
    probed_ratio: float


async def choose_padding(ratio: float, measure: Ratio) -> Padding:
    """Layers for a verify step of `ratio` draft steps, by two or three measurements.

    The target gets them, or the draft model where the target's step is longer already. Raises
    `ConfigError` where that takes more than `MAX_LAYERS`.
    """
    own = await measure(0, 0)
    pad_target = own <= ratio

    def split(layers: int) -> tuple[int, int]:
        return (layers, 0) if pad_target else (0, layers)

    def scale(of_ratio: float) -> float:
        """The target's step grows by its layers, so the ratio does; by the draft's, its inverse."""
        return of_ratio if pad_target else 1 / of_ratio

    layers = _PROBE_LAYERS
    for probes in (1, 2):
        probed = await measure(*split(layers))
        each = (scale(probed) - scale(own)) / layers
        wanted = round((scale(ratio) - scale(own)) / each) if each > 0 else MAX_LAYERS + 1
        if wanted > MAX_LAYERS:
            raise ConfigError(
                f"a ratio of {ratio:g} takes more than {MAX_LAYERS} further layers: that of this "
                f"pair is {own:.3g}, and {probed:.3g} with {layers} more"
            )
        if probes == 2 or wanted <= _FAR * layers:
            break
        layers = wanted  # a guess from so far is off by what one layer's cost is off
    return Padding(ratio, *split(wanted), own, probed)
