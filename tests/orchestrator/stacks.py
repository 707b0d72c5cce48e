"""A whole stack in this process: tiny models, the target in float64, services on free ports."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from draft_service.server import build as build_draft
from draft_service.service import DraftService
from flyspec import rpc
from flyspec.client import AdminClient, AsyncClient, Chunk, Completion, Started
from flyspec.config import NO_PORT, DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.telemetry import Telemetry
from flyspec.v1 import draft_pb2_grpc, verify_pb2_grpc
from orchestrator.server import Orchestrator
from tests.waiting import idle, until
from verify_service.server import build as build_verify


@dataclass
class Stack:
    """The running parts."""

    client: AsyncClient
    admin: AdminClient
    verify_engine: Any
    draft_sessions: Any
    verify_servicer: Any
    verify_server: rpc.GrpcServer
    draft_server: rpc.GrpcServer
    orchestrator: Orchestrator
    registry: CollectorRegistry
    http_port: int

    async def restart_verify(self) -> None:
        """Break every stream to the verify service; it comes back without its sessions."""
        port = self.verify_server.port
        await self.verify_server.stop(0)
        self.verify_server = _verify_server(self.verify_servicer, port)
        await self.verify_server.start()

    async def idle(self) -> bool:
        """Wait until all sessions are gone."""
        return await idle(self.admin)

    async def until(self, **values: int) -> None:
        """Wait until the orchestrator's status has these values."""

        async def has() -> bool:
            status = await self.admin.status()
            return {name: getattr(status, name) for name in values} == values

        await until(has)


@contextmanager
def held(*stacks: Stack):
    """No target begins a step in the block, so generations do not end."""
    go = threading.Event()

    def waiting(forward):
        def wait(*steps):
            go.wait()
            return forward(*steps)

        return wait

    for stack in stacks:
        runner = stack.verify_engine.model
        runner.forward = waiting(runner.forward)
    try:
        yield
    finally:
        go.set()


def slow(stack: Stack) -> None:
    """Make every step of the target slow."""
    slow_down(stack.verify_engine.model, 0.01)


def slow_down(model: Any, seconds: float) -> None:
    """Make every step of a model take so much longer."""
    forward = model.forward

    def slowly(*steps):
        time.sleep(seconds)
        return forward(*steps)

    model.forward = slowly


def _verify_server(servicer, port=0):
    add = verify_pb2_grpc.add_VerifyServiceServicer_to_server
    return rpc.GrpcServer("127.0.0.1", port, [(add, servicer)], ["flyspec.v1.VerifyService"])


@asynccontextmanager
async def start_stack(
    model_dirs, draft: dict[str, Any] | None = None, verify: dict[str, Any] | None = None, **options
):
    """Start everything; `options` are the orchestrator's settings, the others the services'."""
    target, draft_model = model_dirs
    values = {"model": target, "dtype": "float64", "max_sessions": 16, **(verify or {})}
    engine, verify_servicer = build_verify(VerifySettings(**values))
    engine.start()
    verify_server = _verify_server(verify_servicer)
    # The native step, where there is one: most of a test's time would go into drafts.
    values = {"model": draft_model, "dtype": "bfloat16", "threads": 1, "max_sessions": 16}
    values |= draft or {}
    sessions, draft_engine = await build_draft(DraftSettings(**values))
    draft_server = rpc.GrpcServer(
        "127.0.0.1",
        0,
        [(draft_pb2_grpc.add_DraftServiceServicer_to_server, DraftService(sessions))],
        ["flyspec.v1.DraftService"],
    )
    # Tests queue more than a server that means to answer soon would let wait.
    options = {
        "max_waiting": 1024, "max_queue_wait_s": 3600.0, "exact_twin_share": 0.0,
        "http_port": NO_PORT, **options,
    }  # fmt: skip
    settings = OrchestratorSettings(
        port=0,
        admin_port=0,
        verify_address=f"127.0.0.1:{await verify_server.start()}",
        draft_address=f"127.0.0.1:{await draft_server.start()}",
        **options,
    )
    telemetry = Telemetry("orchestrator", settings)
    orchestrator = Orchestrator(settings, telemetry)
    try:
        ports = await orchestrator.start()
        port, admin_port = orchestrator.ports
        async with (
            AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client,
            AdminClient(f"127.0.0.1:{admin_port}") as admin,
        ):
            running = Stack(
                client,
                admin,
                engine,
                sessions,
                verify_servicer,
                verify_server,
                draft_server,
                orchestrator,
                telemetry.registry,
                ports.get("http_port", 0),
            )
            yield running
            verify_server = running.verify_server
    finally:
        await orchestrator.stop(0)
        await draft_server.stop(0)
        await verify_server.stop(0)
        engine.stop()
        if draft_engine is not None:
            await asyncio.to_thread(draft_engine.stop)


@asynccontextmanager
async def orchestrator_at(verify_address, draft_address, **options):
    """Another orchestrator: itself, and clients of its two ports."""
    values = {"max_waiting": 1024, "probe_interval_s": 0.1, **options}
    addresses = {"verify_address": verify_address, "draft_address": draft_address}
    orchestrator = Orchestrator(OrchestratorSettings(port=0, admin_port=0, **addresses, **values))
    await orchestrator.start()
    try:
        port, admin_port = orchestrator.ports
        async with (
            AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client,
            AdminClient(f"127.0.0.1:{admin_port}") as admin,
        ):
            yield orchestrator, client, admin
    finally:
        await orchestrator.stop(0)


@asynccontextmanager
async def orchestrator_over(*stacks, **options):
    """Clients of another orchestrator, over several stacks' targets and the first one's drafter."""
    targets = ",".join(f"127.0.0.1:{stack.verify_server.port}" for stack in stacks)
    draft = f"127.0.0.1:{stacks[0].draft_server.port}"
    async with orchestrator_at(targets, draft, **options) as (_, client, admin):
        yield client, admin


async def until_ready(admin, number: int) -> None:
    """Wait until that many targets are usable."""

    async def are_ready() -> bool:
        return sum(target.ready for target in (await admin.status()).targets) == number

    await until(are_ready)


async def generate(client, prompt, options, after_first):
    """Tokens, prompt and completion of a stream; `after_first` is awaited at its first chunk."""
    tokens, completion, ids = [], None, []
    async for event in client.generate(prompt, options):
        match event:
            case Started():
                ids = event.prompt_token_ids
            case Chunk():
                if not tokens:
                    await after_first()
                tokens += event.token_ids
            case Completion():
                completion = event
    return tokens, ids, completion
