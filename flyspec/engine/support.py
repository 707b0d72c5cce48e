"""Which models the slot cache serves rightly: what their configuration says, and a trial.

A model that attends in a way that `attention` does not know would give wrong text without a word.
So every model is run once, before it serves, against its own attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec.engine.runner import ModelRunner

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest difference from the model's own attention, as a share of the largest logit. Some models
take their softmax in float32 whatever the type."""

_TRIAL_LENGTH = 40


def check_config(name: str, config: Any) -> None:
    """Refuse a model whose layers hold state that cannot be rolled back, or share their caches.

    Raises `ConfigError`.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"--model {name}: layers of kind {', '.join(sorted(kinds))} hold state that cannot be "
            "rolled back; use a model with full or sliding-window attention only"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"--model {name}: layers that share keys and values are not supported; use a model "
            "whose layers have their own"
        )


def check_model(runner: ModelRunner, model: Any) -> None:
    """Run a short sequence through slots, with a rollback and a neighbour, and compare.

    Raises `ConfigError` if the logits are not those of the model's own attention.
    """
    name, length = runner.info.name, min(_TRIAL_LENGTH, runner.info.context_length)
    ids = [(7 * i * i + 3 * i + 1) % min(runner.info.vocab_size, 251) for i in range(length)]
    try:
        windows, got = _through_slots(runner, ids)
    except (TypeError, NotImplementedError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"--model {name}: {_UNSERVED} ({error!r:.200})") from error
    _check_windows(name, model.config.get_text_config(), windows)
    served = model.config._attn_implementation
    own = "sdpa" if model._supports_sdpa and not _softcap(model) else "eager"
    model.set_attn_implementation(own)
    try:
        with torch.inference_mode():
            expected = model(torch.tensor([ids], device=got.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(served)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE.get(expected.dtype, 0.1):
        raise ConfigError(
            f"--model {name}: {_UNSERVED} (its logits differ by {difference:.2g} of the largest)"
        )


_UNSERVED = (
    "this model's attention cannot be served from the slot cache; use a decoder with plain, "
    "grouped or sliding-window attention"
)


def _through_slots(runner: ModelRunner, ids: list[int]) -> tuple[dict[int, int | None], Tensor]:
    """The layers' windows, and the logits of all of `ids` in two pieces, the second one packed."""
    from flyspec.engine.runner import Step

    cache, cut = runner.cache, len(ids) // 2
    slot = cache.acquire().slot
    neighbour = cache.acquire().slot if cache.num_free else None
    try:
        # Tokens beyond `cut` are rolled back.
        runner.forward([Step(slot, 0, [*ids[:cut], *ids[:3]])])
        before, windows = runner.probe(Step(slot, 0, ids[:cut], cut))
        steps = [Step(slot, cut, ids[cut:], len(ids) - cut)]
        if neighbour is not None:
            steps.insert(0, Step(neighbour, 0, ids[::-1]))
        return windows, torch.cat([before, runner.forward(steps)[-1]])
    finally:
        for taken in (slot, neighbour):
            if taken is not None:
                cache.release(taken)


def _check_windows(name: str, config: Any, windows: dict[int, int | None]) -> None:
    """Every layer called our attention, with the window that the configuration names."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        limited = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if limited else "full_attention"] * layers
    for layer, kind in enumerate(kinds[:layers]):
        expected = window if kind == "sliding_attention" else None
        if layer not in windows or windows[layer] != expected:
            raise ConfigError(
                f"--model {name}: {_UNSERVED} (layer {layer} should attend with "
                f"{'no window' if expected is None else f'a window of {expected}'} and "
                f"{'did not ask' if layer not in windows else f'asked for {windows[layer]}'})"
            )


def _softcap(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))
