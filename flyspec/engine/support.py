"""Which models the slot cache serves rightly: what their configuration says, and a trial.

A model that attends in a way that `attention` does not know would give wrong text without a word.
So every model is run once, before it serves, against its own attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec.engine.runner import ModelRunner

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest difference from the model's own attention, as a share of the largest logit. Some models
take their softmax in float32 whatever the type."""

SERVED_LAYERS = {"full_attention", "sliding_attention"}
_TRIAL_LENGTH = 40
_INSTEAD = (
    "use a decoder with plain, grouped or sliding-window attention, such as Llama, Qwen 2 or 3, "
    "Mistral, Gemma 2 or 3"
)


def check_config(name: str, config: Any, context_length: int) -> None:
    """Refuse what a text model's configuration shows already. Raises `ConfigError`.

    State that cannot be rolled back, caches that layers share, attention to later tokens, positions
    whose meaning depends on the length of the whole sequence.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if kinds:
        raise _unserved(name, f"it has layers of kind {', '.join(sorted(map(str, kinds)))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _unserved(name, "some of its layers share their keys and values")
    if getattr(config, "is_encoder_decoder", False):
        raise _unserved(name, "it has an encoder")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(
        config, "is_causal", True
    ):
        raise _unserved(name, "its attention is bidirectional")
    if not getattr(config, "num_hidden_layers", None):
        raise _unserved(name, "its configuration names no number of layers")
    for limit, kind in _rope_limits(config):
        if context_length > limit:
            raise ConfigError(
                f"--model {name}: beyond {limit} tokens its rotary embedding (type {kind}) turns "
                "keys by another angle than those cached before; "
                f"use --max-model-len {limit} or less"
            )


def check_call(
    module: torch.nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, Any]
) -> None:
    """Refuse what a layer asks of its attention and `attention` does not do.

    `arguments` are those that it does not know. Raises `NotImplementedError`.
    """
    if attention_mask is not None:
        raise NotImplementedError("it makes attention masks of its own")
    if arguments.get("s_aux") is not None:
        raise NotImplementedError("its attention has sinks")
    if arguments.get("position_bias") is not None:
        raise NotImplementedError("its attention adds a bias for positions")
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("its attention is bidirectional")


def check_model(runner: ModelRunner, model: Any) -> None:
    """Run a short sequence through slots, with a rollback and a neighbour, and compare.

    Raises `ConfigError` if the logits are not those of the model's own attention.
    """
    name, length = runner.info.name, min(_TRIAL_LENGTH, runner.info.context_length)
    ids = [(7 * i * i + 3 * i + 1) % min(runner.info.vocab_size, 251) for i in range(length)]
    expected = _own_logits(name, model, ids)
    try:
        windows, got = _through_slots(runner, ids)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--model {name}: no memory for {runner.cache.num_slots} sessions of "
            f"{runner.cache.max_length} tokens; lower --max-sessions, --max-model-len or "
            "--kv-cache-memory-bytes"
        ) from error
    except NotImplementedError as error:
        raise _unserved(name, str(error)) from error
    except (
        Exception
    ) as error:  # whatever a model makes of a cache and attention that are not its own
        raise _unserved(name, f"{type(error).__name__}: {_line(error)}") from error
    _check_windows(name, model.config.get_text_config(), windows)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE.get(expected.dtype, 0.1):
        raise _unserved(name, f"its logits would differ by {difference:.2g} of the largest")


def _unserved(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--model {name}: cannot be served from the slot cache: {reason}; {_INSTEAD}"
    )


def _line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.200}"


def _own_logits(name: str, model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab] of the model's own attention, in one forward without a cache."""
    served = model.config._attn_implementation
    own = "sdpa" if model._supports_sdpa and not _softcap(model) else "eager"
    model.set_attn_implementation(own)
    try:
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=model.device)
            logits: Tensor = model(tokens, use_cache=False).logits[0]
            return logits
    except Exception as error:
        raise ConfigError(
            f"--model {name}: does not run in {model.dtype} on {model.device}: {_line(error)}; "
            "try another --dtype or --device"
        ) from error
    finally:
        model.set_attn_implementation(served)


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
    # A checkpoint's config.json may name a window that its model does not know.
    declared = hasattr(type(config), "sliding_window")
    window = getattr(config, "sliding_window", None) if declared else None
    if kinds is None:
        limited = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if limited else "full_attention"] * layers
    for layer, kind in enumerate(kinds[:layers]):
        if layer not in windows:
            raise _unserved(name, f"layer {layer} does not use transformers' attention interface")
        expected = window if kind == "sliding_attention" else None
        if windows[layer] != expected:
            wanted, asked = (w or "no" for w in (expected, windows[layer]))
            raise _unserved(
                name, f"layer {layer} has {wanted} window and asks its attention for {asked}"
            )


def _rope_limits(config: Any) -> Iterator[tuple[int, str]]:
    """Lengths beyond which rotary embeddings change for all positions, with their type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping):
            kind, own = rope.get("rope_type"), rope.get("original_max_position_embeddings")
            if kind == "longrope" and own:
                yield int(own), kind
            elif kind is not None and "dynamic" in kind:
                yield int(config.max_position_embeddings), kind


def _softcap(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))
