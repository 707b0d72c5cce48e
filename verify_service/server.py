"""Puts the verify service together: model, engine, port, drain."""

from __future__ import annotations

import logging

import torch

from flyspec import rpc
from flyspec.config import VerifySettings
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner
from flyspec.telemetry import configure_logging
from flyspec.v1 import verify_pb2_grpc
from verify_service.engine import VerifyEngine
from verify_service.service import VerifyServicer

log = logging.getLogger(__name__)

SERVICE_NAME = "flyspec.v1.VerifyService"


def build(settings: VerifySettings) -> tuple[VerifyEngine, VerifyServicer]:
    """Load and warm up the target. Raises `ConfigError`. The engine is not started yet."""

    def prepare() -> None:
        # OpenMP keeps the number of threads per calling thread.
        if settings.threads:
            torch.set_num_threads(settings.threads)

    prepare()
    loaded = load_model(settings.model, settings.device, settings.dtype, settings.max_model_len)
    runner = ModelRunner(loaded, settings.max_sessions, settings.prefill_chunk)
    runner.warm_up()
    engine = VerifyEngine(runner, loaded.tokenizer, settings.max_queue, prepare)
    return engine, VerifyServicer(engine, loaded.tokenizer, settings)


async def serve(settings: VerifySettings) -> None:
    """Serve until SIGTERM, then drain. Raises `ConfigError` when it cannot start."""
    configure_logging("verify", settings.log_level)
    engine, servicer = build(settings)
    engine.start()
    server = rpc.GrpcServer(
        settings.host,
        settings.port,
        [(verify_pb2_grpc.add_VerifyServiceServicer_to_server, servicer)],
        [SERVICE_NAME],
    )
    port = await server.start()
    rpc.settle_memory()
    await server.set_ready(True)
    log.info("listening on %s:%d", settings.host, port)
    rpc.announce(settings.ready_fd, {"port": port})
    await rpc.wait_for_termination()
    log.info("draining")
    await server.stop(settings.drain_grace_s)
    engine.stop()
