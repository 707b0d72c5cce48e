"""The drafters that a service offers: those whose model and datastore it has."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafter
from draft_service.drafters.composed import ComposedDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.drafters.retrieval import (
    RetrievalDrafter,
    datastore_source,
    lookup_source,
    recycling_source,
)
from flyspec.datastore.store import Datastore
from flyspec.engine.model import Model
from flyspec.lookup.recycling import NUM_CANDIDATES
from flyspec.lookup.shared import Scopes
from flyspec.values.admin import DrafterInfo


def offered(
    model: Model | None,
    eos_token_ids: Sequence[int],
    datastore: Datastore | None,
    max_length: int,
) -> list[Drafter]:
    """Return them, the default one first.

    Without a model, sequences have at most `max_length` tokens (0: no limit).
    """
    scopes = Scopes()
    lookup, recycling = lookup_source(scopes), recycling_source(scopes)
    by_model = ModelDrafter(model, eos_token_ids) if model else None
    drafters: list[Drafter] = []
    if model and by_model:
        drafters += [by_model, MultiLevelDrafter(model, eos_token_ids)]
    drafters += [
        RetrievalDrafter(DrafterInfo("prompt_lookup", "prompt_lookup"), lookup, max_length),
        RetrievalDrafter(
            DrafterInfo("token_recycling", "token_recycling", num_top_tokens=NUM_CANDIDATES),
            recycling,
            max_length,
        ),
    ]
    sources, fingerprint = [lookup, recycling], ""
    if datastore:
        stored, fingerprint = datastore_source(datastore), datastore.facts.tokenizer_fingerprint
        info = DrafterInfo("rest", "rest", tokenizer_fingerprint=fingerprint)
        drafters.append(RetrievalDrafter(info, stored, max_length))
        if model is None or model.info.tokenizer_fingerprint == fingerprint:
            sources.append(stored)
    return [*drafters, ComposedDrafter(sources, by_model, max_length, fingerprint)]
