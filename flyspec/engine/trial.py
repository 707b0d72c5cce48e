"""The trial of a transformers model: its logits from slots must match its own attention's.

A model that attends in a way that `attention` does not implement would silently generate wrong
text, so every model is run once before it serves. `supported` checks its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flyspec.engine.model import Model, Step
from flyspec.engine.out_of_memory import is_out_of_memory, no_memory
from flyspec.engine.supported import unserved
from flyspec.errors import ConfigError

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Maximum difference from the model's own attention, as a share of the largest logit. Some models
compute softmax in float32 whatever the type."""

_TRIAL_LENGTH = 40


def check_model(runner: Model, model: Any, windows: Mapping[int, int | None]) -> None:
    """Run a short sequence through slots, with a rollback and a neighbour, and compare.

    `windows` is filled with the window that each layer requests of its attention. Raises
    `ConfigError` if the logits do not match those of the model's own attention.
    """
    name, ids = runner.info.name, _trial_ids(runner)
    expected = _own_logits(name, model, ids)
    if not expected.isfinite().all():
        raise _not_finite(name, model)
    try:
        got = _through_slots(runner, ids)
    except NotImplementedError as error:
        raise unserved(name, str(error)) from error
    except Exception as error:  # anything, as the cache and attention are not the model's own
        if is_out_of_memory(error):
            slots, length = runner.cache.num_slots, runner.info.context_length
            doing = f"trying a KV cache of {slots} slots x {length} tokens"
            raise no_memory(name, doing, error) from error
        raise unserved(name, f"{type(error).__name__}: {_line(error)}") from error
    _check_windows(name, model.config.get_text_config(), windows)
    difference = _difference(got, expected)
    if difference is not None:
        raise unserved(name, f"its logits would differ by {difference:.2g} of the largest logit")


def check_faster(runner: Model, faster: Callable[[], None]) -> float | None:
    """Return by how much of the largest logit `faster`, a way to run the model's steps that it
    turns on, changes the logits of a short sequence; None if that is only rounding."""
    ids = _trial_ids(runner)
    expected = _through_slots(runner, ids)
    faster()
    return _difference(_through_slots(runner, ids), expected)


def _trial_ids(runner: Model) -> list[int]:
    length = min(_TRIAL_LENGTH, runner.info.context_length)
    return [(7 * i * i + 3 * i + 1) % min(runner.info.vocab_size, 251) for i in range(length)]


def _difference(got: Tensor, expected: Tensor) -> float | None:
    difference = float((got - expected).abs().max() / expected.abs().max())
    return None if difference <= TOLERANCE.get(expected.dtype, 0.1) else difference


def _not_finite(name: str, model: Any) -> ConfigError:
    """Return the error for a model whose own logits are NaN or infinite, and whose fault it is."""
    for tensor, weight in model.named_parameters():
        if not weight.isfinite().all():
            return ConfigError(
                f"--model {name}: its weight {tensor} has values that are not finite (NaN or "
                "infinite); get the weights again, or use another --dtype if they overflow in it"
            )
    return ConfigError(
        f"--model {name}: its logits are not finite (NaN or infinite) in {model.dtype} on "
        f"{model.device}; try another --dtype or --device"
    )


def _line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.200}"


def _own_logits(name: str, model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab] with the model's own attention, in one forward without a cache."""
    served = model.config._attn_implementation
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    own = "sdpa" if model._supports_sdpa and not softcap else "eager"
    model.set_attn_implementation(own)
    try:
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=model.device)
            logits: Tensor = model(tokens, use_cache=False).logits[0]
            return logits
    except Exception as error:
        if is_out_of_memory(error):
            raise no_memory(name, "trying a short text", error) from error
        raise ConfigError(
            f"--model {name}: does not run in {model.dtype} on {model.device}: {_line(error)}; "
            "try another --dtype or --device"
        ) from error
    finally:
        model.set_attn_implementation(served)


def _through_slots(runner: Model, ids: list[int]) -> Tensor:
    """The logits of all of `ids`, run in two pieces, the second one packed."""
    cache, cut = runner.cache, len(ids) // 2
    fits = 2 * cache.blocks_to_open(len(ids)) <= cache.num_free_blocks
    with cache.borrowed(2 if fits else 1) as (slot, *neighbours):
        # Tokens beyond `cut` are rolled back.
        runner.forward([Step(slot, 0, [*ids[:cut], *ids[:3]])])
        (before,) = runner.forward([Step(slot, 0, ids[:cut], cut)])
        steps = [Step(slot, cut, ids[cut:], len(ids) - cut)]
        steps = [*(Step(other, 0, ids[::-1]) for other in neighbours), *steps]
        kept = before.logits.clone()
        return torch.cat([kept, runner.forward(steps)[-1].logits.clone()])


def _check_windows(name: str, config: Any, windows: Mapping[int, int | None]) -> None:
    """Check that every layer called our attention, with the window in the configuration."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    # A checkpoint's config.json may set a window that its model does not have.
    declared = hasattr(type(config), "sliding_window")
    window = getattr(config, "sliding_window", None) if declared else None
    if kinds is None:
        limited = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if limited else "full_attention"] * layers
    for layer, kind in enumerate(kinds[:layers]):
        if layer not in windows:
            raise unserved(name, f"layer {layer} does not use transformers' attention interface")
        expected = window if kind == "sliding_attention" else None
        if windows[layer] != expected:
            wanted, asked = (w or "none" for w in (expected, windows[layer]))
            raise unserved(
                name, f"layer {layer}'s configured window is {wanted}, but it requests {asked}"
            )
