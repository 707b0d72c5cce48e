"""Assembles and runs the verify service: model, engine, port, drain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flyspec import rpc, serving
from flyspec.config import VerifySettings
from flyspec.engine.autojudge import read_judge
from flyspec.engine.out_of_memory import naming_memory
from flyspec.engine.scheduler import StepBudget
from flyspec.serving import OnePort
from flyspec.startup import stage
from flyspec.step_costs import StepCosts
from flyspec.telemetry import Telemetry, configure_logging
from flyspec.v1 import verify_pb2_grpc
from verify_service.engine import VerifyEngine
from verify_service.ranks import Ranks, find_place, follow, load, set_threads
from verify_service.service import VerifyServicer
from verify_service.telemetry import VerifyTelemetry
from verify_service.warm_target import fitted, load_heads, measure_steps

SERVICE_NAME = "flyspec.v1.VerifyService"


def build(
    settings: VerifySettings, ranks: Ranks | None = None, observer: VerifyTelemetry | None = None
) -> tuple[VerifyEngine, VerifyServicer]:
    """Load and warm up the target, together with the other `ranks` if any.

    Raises `ConfigError`. The engine is not started yet.
    """
    if settings.device != "cpu" and torch.cuda.is_available():
        return _build(settings, ranks, observer)
    # OpenMP keeps the threads that helped a thread for as long as that one lives, and threads that
    # wait for each other sleep at once if there are more than processors: the engine's would.
    with ThreadPoolExecutor(1, "loading") as own:
        return own.submit(_build, settings, ranks, observer).result()


def _build(
    settings: VerifySettings, ranks: Ranks | None, observer: VerifyTelemetry | None
) -> tuple[VerifyEngine, VerifyServicer]:
    observer = observer or VerifyTelemetry(Telemetry("verify"))

    def prepare() -> None:
        # OpenMP keeps its number of threads per calling thread.
        set_threads(settings, None if ranks is None else ranks.place)

    prepare()
    file = settings.autojudge_file
    autojudge = read_judge(Path(file).expanduser()) if file else None
    loaded, model = load(settings, ranks.start() if ranks else None)
    try:
        with naming_memory(loaded.info.name, "warming up"):
            stage("warming up")
            model.warm_up()
            if ranks is not None:
                ranks.lead(model)
            if autojudge is not None:
                autojudge = fitted(autojudge, model, file)
            heads = load_heads(settings.heads, loaded, model, settings.flash_attn)
            stage("timing steps")
            costs = StepCosts(measure_steps(model))
    except Exception as error:
        if ranks is not None:
            ranks.failed(error)
        raise
    budget = StepBudget(settings.max_num_batched_tokens, settings.prefill_chunk)
    on_step = observer.engine_metrics.step
    engine = VerifyEngine(
        model, loaded.tokenizer, settings.max_queue, prepare, budget, on_step,
        settings.max_waiting, settings.step_timeout_s, autojudge, heads,
    )  # fmt: skip
    engine.costs = costs
    return engine, VerifyServicer(engine, loaded.tokenizer, settings, observer)


async def serve(settings: VerifySettings) -> None:
    """Serve until SIGTERM, then drain. Raises `ConfigError` if the service cannot start.

    Other ranks of a tensor-parallel target follow rank 0 until it stops.
    """
    place = find_place(settings)
    if place is None:
        await _serve(settings, None)
    elif place.rank > 0:
        configure_logging("verify", settings.log_level, settings.log_format)
        follow(settings, place)
    else:
        ranks = Ranks(place, settings)
        try:
            await _serve(settings, ranks)
        finally:
            ranks.stop()


async def _serve(settings: VerifySettings, ranks: Ranks | None) -> None:
    async def loaded(telemetry: Telemetry) -> OnePort:
        credentials = settings.port_security.credentials()
        observer = VerifyTelemetry(telemetry)
        engine, servicer = build(settings, ranks, observer)
        observer.watch(engine)
        engine.start().result()
        server = rpc.GrpcServer(
            settings.host,
            settings.port,
            [(verify_pb2_grpc.add_VerifyServiceServicer_to_server, servicer)],
            [SERVICE_NAME],
            rpc.max_streams(settings.max_sessions),
            rpc.max_request_bytes(engine.info.context_length),
            credentials=credentials,
            interceptors=telemetry.interceptors(),
            checks=rpc.checks_of(settings.port_security),
        )
        return OnePort(server, engine.stop, engine.failures.lost)

    await serving.serve("verify", settings, loaded)
