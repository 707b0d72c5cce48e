"""Chooses what serves a model: the native step where possible, or transformers' modules."""

from __future__ import annotations

import logging
import time

from flyspec.config import ModelServerSettings
from flyspec.engine.cache_size import plan_cache
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Model
from flyspec.engine.native.family import library_for
from flyspec.engine.native.model import NativeModel
from flyspec.engine.native.trial import has_passed, note_passed, try_out
from flyspec.engine.out_of_memory import naming_memory
from flyspec.engine.runner import ModelRunner
from flyspec.process import available_cores
from flyspec.startup import stage

log = logging.getLogger(__name__)


def choose_model(
    loaded: LoadedModel, settings: ModelServerSettings, batch_invariant: bool | None = False
) -> Model:
    """Return the model of a single-process service; if native, its trial is done. Warm it up next.

    A native model uses the threads in the settings, or one per core, and no longer needs the
    module: drop `loaded.model` to free its memory. Logs the choice and why. Raises `ConfigError`.
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
    library = library_for(info.name, model.config, info.device, info.dtype, settings.block_size)
    if isinstance(library, str):
        return library
    stage("packing weights for the native step")
    began = time.perf_counter()
    plan = plan_cache(loaded, settings)
    threads = settings.threads or available_cores()
    try:
        with naming_memory(info.name, f"packing it with {plan.num_slots} slots"):
            native = NativeModel(loaded, plan.num_slots, library, threads)
    except ValueError as error:
        return f"{info.name}: {error}"
    packed = time.perf_counter()
    try:
        if has_passed(native, loaded):
            log.info("the native step is the one that was compared with transformers before")
            native.cache.forget()
            return native
        stage("comparing the native step with transformers")
        with naming_memory(info.name, "comparing it with transformers"):
            outcome = try_out(native, loaded)
    except ArithmeticError as error:
        return f"the native step failed its trial: {error}"
    log.debug("packed in %.2f s, trial took %.2f s: %s",
              packed - began, time.perf_counter() - packed, outcome)  # fmt: skip
    if reason := outcome.refusal():
        return f"the native step failed its trial: {reason}"
    note_passed(native, loaded, outcome)
    native.cache.forget()
    return native
