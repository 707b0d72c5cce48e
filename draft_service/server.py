"""Assembles the service from its settings and runs it. Imports torch only with a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from draft_service.drafters.base import Drafter
from draft_service.drafters.composed import ComposedDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.drafters.retrieval import prompt_lookup, rest, token_recycling
from draft_service.service import DraftService
from draft_service.sessions import Engine, Sessions
from draft_service.telemetry import DraftTelemetry
from draft_service.tokenizers import Tokenizers
from flyspec import rpc, serving
from flyspec.config import DraftSettings
from flyspec.datastore.store import Datastore
from flyspec.drafter_names import check_needs
from flyspec.engine.model import Model
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ConfigError
from flyspec.lookup.shared import Scopes
from flyspec.serving import OnePort
from flyspec.spelling import install_command
from flyspec.startup import large_imports, stage
from flyspec.telemetry import Telemetry
from flyspec.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
MAX_LOOKUP_LENGTH = 1 << 17
"""Default maximum sequence length of a drafter without a model, in tokens."""


Build: TypeAlias = Callable[
    [DraftSettings, DraftTelemetry], Awaitable[tuple[Sessions, Engine | None]]
]
"""Creates the sessions of a draft service and starts the engine that they need."""


async def build(
    settings: DraftSettings, observer: DraftTelemetry | None = None
) -> tuple[Sessions, Engine | None]:
    """Load and warm up what the settings request. Raises `ConfigError`."""
    observer = observer or DraftTelemetry(Telemetry("draft"))
    check_needs(settings.drafter, bool(settings.model), bool(settings.datastore))
    datastore = Datastore(Path(settings.datastore)) if settings.datastore else None
    engine, tokenizers = None, Tokenizers()
    eos: tuple[int, ...] = ()
    if settings.model:
        engine, eos, tokenizers = _load(settings, observer)
    model = engine.model if engine else None
    most = settings.max_model_len or MAX_LOOKUP_LENGTH
    drafters = offered(model, eos, datastore, most)
    names = [d.info.name for d in drafters]
    if settings.drafter:
        drafters.insert(0, drafters.pop(names.index(settings.drafter)))
    if engine is not None:
        stage("warming up")
        await asyncio.wrap_future(engine.start())
    return Sessions(drafters, engine, settings, tokenizers), engine


def _load(
    settings: DraftSettings, observer: DraftTelemetry
) -> tuple[Engine, tuple[int, ...], Tokenizers]:
    """Load the draft model: its engine (not started), what ends its texts, tokenizers."""
    try:
        with large_imports():
            from draft_service.loading import load
            from flyspec.engine.threads import set_threads
    except ImportError as error:
        raise ConfigError(
            f"--model {settings.model}: needs torch and transformers ({error}); "
            f"{install_command('models')}, or omit --model to use prompt lookup only"
        ) from error

    def prepare() -> None:
        set_threads(settings.threads)
        model.warm_up()

    set_threads(settings.threads)
    loaded, model = load(settings)
    budget = StepBudget(settings.max_num_batched_tokens, settings.prefill_chunk)
    tokenizers = Tokenizers(loaded.tokenizer, loaded.info.vocab_size)
    on_step = observer.engine_metrics.step
    engine = Engine(model, prepare, budget, on_step, settings.step_timeout_s)
    return engine, loaded.tokenizer.eos_token_ids, tokenizers


async def serve(settings: DraftSettings, make: Build = build) -> None:
    """Load, warm up, listen; serve until SIGTERM or SIGINT, then drain. Raises `ConfigError`.

    `make` can supply other drafters than the settings name.
    """

    async def load(telemetry: Telemetry) -> OnePort:
        credentials = settings.port_security.credentials()
        observer = DraftTelemetry(telemetry)
        sessions, engine = await make(settings, observer)
        observer.watch(sessions)
        if engine is not None:
            observer.engine_metrics.watch(
                lambda: engine.failures.num_total, lambda: engine.step_running_ns
            )
        log.info("drafters: %s", ", ".join(d.name for d in sessions.describe().drafters))
        server = rpc.GrpcServer(
            settings.host,
            settings.port,
            [(draft_pb2_grpc.add_DraftServiceServicer_to_server, DraftService(sessions, observer))],
            [SERVICE_NAME],
            rpc.max_streams(settings.max_sessions),
            rpc.max_request_bytes(sessions.max_length),
            credentials=credentials,
            interceptors=telemetry.interceptors(),
            checks=rpc.checks_of(settings.port_security),
        )
        if engine is None:
            return OnePort(server, lambda: None)
        return OnePort(server, engine.stop, engine.failures.lost)

    await serving.serve("draft", settings, load)


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
