"""Puts the orchestrator together: upstreams, admission, two ports, drain."""

from __future__ import annotations

import asyncio
import logging

from flyspec import rpc
from flyspec.config import OrchestratorSettings
from flyspec.errors import ConfigError
from flyspec.telemetry import configure_logging
from flyspec.types import Rule
from flyspec.v1 import admin_pb2_grpc, generation_pb2_grpc
from flyspec.validation import validate_rule
from orchestrator.admission import Admission
from orchestrator.directory import Directory
from orchestrator.service import AdminServicer, GenerationServicer

log = logging.getLogger(__name__)


async def serve(settings: OrchestratorSettings) -> None:
    """Serve until SIGTERM, then drain. Raises `FlyspecError` when it cannot start."""
    configure_logging("orchestrator", settings.log_level)
    validate_rule(Rule(settings.rule))
    directory = Directory(settings)
    termination = asyncio.create_task(rpc.wait_for_termination())
    connecting = asyncio.create_task(directory.connect())
    await asyncio.wait({termination, connecting}, return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        connecting.cancel()
        await directory.close()
        return
    connecting.result()
    if settings.num_speculative_tokens > directory.max_draft_tokens:
        raise ConfigError(
            f"--num-speculative-tokens {settings.num_speculative_tokens}: the services take at "
            f"most {directory.max_draft_tokens}; lower it or raise their --max-speculative-tokens"
        )
    admission = Admission(settings.max_concurrent or directory.max_sessions, settings.max_waiting)
    generation = rpc.GrpcServer(
        settings.host,
        settings.port,
        [
            (
                generation_pb2_grpc.add_GenerationServiceServicer_to_server,
                GenerationServicer(directory, admission, settings),
            )
        ],
        ["flyspec.v1.GenerationService"],
    )
    admin = rpc.GrpcServer(
        settings.host,
        settings.admin_port,
        [
            (
                admin_pb2_grpc.add_AdminServiceServicer_to_server,
                AdminServicer(directory, admission),
            )
        ],
        ["flyspec.v1.AdminService"],
    )
    port, admin_port = await generation.start(), await admin.start()
    for server in (generation, admin):
        await server.set_ready(True)
    log.info("listening on %s:%d, admin on %d", settings.host, port, admin_port)
    rpc.announce(settings.ready_fd, {"port": port, "admin_port": admin_port})
    monitor = asyncio.create_task(directory.monitor())
    await termination
    log.info("draining")
    monitor.cancel()
    await generation.stop(settings.drain_grace_s)
    await admin.stop(0)
    await directory.close()
