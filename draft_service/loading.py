"""Loads the draft model. Imports torch, which a service without a model does without."""

from __future__ import annotations

import logging
from functools import partial

from flyspec.config import DraftSettings
from flyspec.engine.cache_size import check_fits
from flyspec.engine.configuration import own_context_length, read_config
from flyspec.engine.loading import LoadedModel, load_model
from flyspec.engine.model import Model
from flyspec.engine.native.choice import choose_model

log = logging.getLogger(__name__)


def load(settings: DraftSettings) -> tuple[LoadedModel, Model]:
    """Load the draft model and what runs it, to be warmed up next. Raises `ConfigError`."""
    length, limit = settings.max_model_len, own_context_length(read_config(settings.model)[1])
    if length > limit:
        # A drafter merely proposes nothing beyond its own limit.
        log.warning("--max-model-len %d exceeds the draft model's own limit; using %d",
                    length, limit)  # fmt: skip
        length = limit
    loaded = load_model(
        settings.model,
        settings.device,
        settings.dtype,
        length,
        check=partial(check_fits, settings),
        served_model_name=settings.served_model_name,
    )
    return loaded, choose_model(loaded, settings)
