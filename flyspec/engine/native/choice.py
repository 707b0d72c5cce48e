"""Which implementation serves a model: the native step where it may, or transformers' modules."""

from __future__ import annotations

import logging
import time

import torch

from flyspec.config import ModelServerSettings
from flyspec.engine.cache_size import plan_cache
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Model
from flyspec.engine.native.family import unsupported
from flyspec.engine.native.library import find
from flyspec.engine.native.model import NativeModel
from flyspec.engine.native.trial import try_out
from flyspec.engine.out_of_memory import naming_memory
from flyspec.engine.runner import ModelRunner
from flyspec.process import available_cores

log = logging.getLogger(__name__)


def choose_model(
    loaded: LoadedModel, settings: ModelServerSettings, batch_invariant: bool | None = False
) -> Model:
    """The model of a service in one process, tried out if it is native; `warm_up` remains.

    A native one has the threads of the settings, or one for each core, and needs the module no
    more: drop `loaded.model` for its memory. The log says which and why. Raises `ConfigError`.
    """
    native = _native(loaded, settings)
    if isinstance(native, NativeModel):
        log.info("native step: %s", native)
        return native
    log.info("transformers' modules: %s", native)
    return ModelRunner.planned(loaded, settings, batch_invariant=batch_invariant)


def _native(loaded: LoadedModel, settings: ModelServerSettings) -> NativeModel | str:
    """The native model, or why there is none."""
    model, info = loaded.model, loaded.info
    if model.device.type != "cpu":
        return f"{info.name} is on {info.device}"
    if model.dtype != torch.bfloat16:
        return f"{info.name} is in {info.dtype}, and the native step has bfloat16 alone"
    if reason := unsupported(model.config):
        return f"{info.name}: {reason}"
    library = find()
    if isinstance(library, str):
        return f"no native step: {library}"
    began = time.perf_counter()
    plan = plan_cache(loaded, settings)
    threads = settings.threads or available_cores()
    try:
        with naming_memory(info.name, f"it was packed with {plan.num_slots} slots"):
            native = NativeModel(loaded, plan.num_slots, library, threads)
    except ValueError as error:
        return f"{info.name}: {error}"
    packed = time.perf_counter()
    try:
        with naming_memory(info.name, "it was tried against transformers"):
            outcome = try_out(native, loaded)
    except ArithmeticError as error:
        return f"the native step failed its trial: {error}"
    log.debug("packed in %.2f s, tried in %.2f s: %s",
              packed - began, time.perf_counter() - packed, outcome)  # fmt: skip
    if reason := outcome.refusal():
        return f"the native step failed its trial: {reason}"
    native.cache.forget()
    return native
