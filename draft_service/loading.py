"""Loads the draft model. Imports torch, which a service without a model does without."""

from __future__ import annotations

from functools import partial

from flyspec.config import DraftSettings
from flyspec.engine.cache_size import check_fits
from flyspec.engine.configuration import own_context_length, read_config
from flyspec.engine.loading import LoadedModel, load_model
from flyspec.engine.model import Model
from flyspec.engine.native.choice import choose_model
from flyspec.engine.supported import within_limit
from flyspec.model_files import is_gguf

AHEAD_SLOTS = 8
"""Slots of the draft model for what is drafted ahead of verdicts, shared by all sessions."""


def load(settings: DraftSettings) -> tuple[LoadedModel, Model]:
    """Load the draft model and what runs it, to be warmed up next. Raises `ConfigError`.

    Its slots are those of the sessions, and `AHEAD_SLOTS` more.
    """
    slots = {"max_sessions": settings.max_sessions + AHEAD_SLOTS}
    settings = settings.model_copy(update=slots)
    if is_gguf(settings.model):
        from flyspec.engine.llama_cpp.loading import load as load_gguf  # needs an extra

        return load_gguf(settings, drafts=True)
    length = within_limit(
        settings.max_model_len, own_context_length(read_config(settings.model)[1])
    )
    loaded = load_model(
        settings.model,
        settings.device,
        settings.dtype,
        length,
        check=partial(check_fits, settings),
        served_model_name=settings.served_model_name,
    )
    return loaded, choose_model(loaded, settings)
