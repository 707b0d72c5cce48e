"""How many layers to add to a pair of models for a given ratio of their steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flyspec.errors import ConfigError

_PROBE_LAYERS = 8
"""Layers added to find out the cost of one."""
_FAR = 2
"""A first guess of more than this times the probed layers is measured, too."""
MAX_LAYERS = 1024

Ratio = Callable[[int, int], Awaitable[float]]
"""Measures verify step / draft step with layers added to the target and to the draft model."""


@dataclass(frozen=True)
class Padding:
    """Layers to add for `ratio`, and the measurements they were computed from.

    `own_ratio` is the pair's own, `probed_ratio` that with layers added to the model to pad. Only
    ratios are used: a machine whose speed drifts slows both models of a round alike.
    """

    ratio: float
    target_layers: int
    draft_layers: int
    own_ratio: float
    probed_ratio: float


async def choose_padding(ratio: float, measure: Ratio) -> Padding:
    """Choose layers for a verify step as long as `ratio` draft steps, by two or three measurements.

    They are added to the target, or to the draft model if the ratio is already larger. Raises
    `ConfigError` if that takes more than `MAX_LAYERS`.
    """
    own = await measure(0, 0)
    pad_target = own <= ratio

    def split(layers: int) -> tuple[int, int]:
        return (layers, 0) if pad_target else (0, layers)

    def scale(of_ratio: float) -> float:
        """Return what grows linearly with the layers: the ratio, or for the draft its inverse."""
        return of_ratio if pad_target else 1 / of_ratio

    layers = _PROBE_LAYERS
    for probes in (1, 2):
        probed = await measure(*split(layers))
        each = (scale(probed) - scale(own)) / layers
        wanted = round((scale(ratio) - scale(own)) / each) if each > 0 else MAX_LAYERS + 1
        if wanted > MAX_LAYERS:
            raise ConfigError(
                f"a ratio of {ratio:g} takes more than {MAX_LAYERS} further layers: this pair's "
                f"is {own:.3g}, and {probed:.3g} with {layers} more"
            )
        if probes == 2 or wanted <= _FAR * layers:
            break
        layers = wanted  # a guess from far away multiplies the error of one layer's cost
    return Padding(ratio, *split(wanted), own, probed)
