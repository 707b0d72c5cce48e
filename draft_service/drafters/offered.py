"""The drafters that a service offers: those whose model and datastore it has."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafter
from draft_service.drafters.composed import ComposedDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.drafters.retrieval import prompt_lookup, rest, token_recycling
from flyspec.datastore.store import Datastore
from flyspec.engine.model import Model
from flyspec.lookup.shared import Scopes


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
    by_model = ModelDrafter(model, eos_token_ids) if model else None
    drafters: list[Drafter] = []
    if model and by_model:
        drafters += [by_model, MultiLevelDrafter(model, eos_token_ids)]
    retrieving = [prompt_lookup(scopes, max_length), token_recycling(scopes, max_length)]
    sources, fingerprint = [each.make_source for each in retrieving], ""
    if datastore:
        stored = rest(datastore, max_length)
        retrieving.append(stored)
        fingerprint = stored.info.tokenizer_fingerprint
        if model is None or model.info.tokenizer_fingerprint == fingerprint:
            sources.append(stored.make_source)
    composed = ComposedDrafter(sources, by_model, max_length, fingerprint)
    return [*drafters, *retrieving, composed]
