"""What the draft service's tests are written with: a driver, a client, a running service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from draft_service.drafters.base import Drafted, DrafterSession
from draft_service.engine import Engine
from draft_service.server import SERVICE_NAME, build
from draft_service.service import DraftService
from draft_service.sessions import Sessions
from flyspec import rpc, wire
from flyspec.config import DraftSettings
from flyspec.engine.runner import ModelRunner, Step
from flyspec.types import DraftAdvance, DraftChunk, DraftOpen, Origin, SamplingParams
from flyspec.v1 import draft_pb2_grpc

CONTEXT_LENGTH = 160
VOCAB_SIZE = 300
GREEDY = SamplingParams()


class CountingRunner(ModelRunner):
    """A runner that counts its steps."""

    steps = 0

    def forward(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        self.steps += len(steps)
        return super().forward(steps)


def drive(
    runner: ModelRunner, session: DrafterSession, max_tokens: int
) -> tuple[list[int], list[Origin]]:
    """A whole proposal, as the engine would make it for one session."""
    tokens: list[int] = []
    origins: list[Origin] = []
    work = session.propose(max_tokens)
    drawn: list[int] | None = None
    while True:
        try:
            item = next(work) if drawn is None else work.send(drawn)
        except StopIteration:
            return tokens, origins
        drawn = None
        if isinstance(item, Drafted):
            tokens += item.token_ids
            origins += item.origins
        else:
            (drawn,) = runner.draw([item])


class Client:
    """One `Draft` stream, in our types."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Draft()

    async def open(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        seed: int = 1,
        drafter: str = "",
    ) -> Client:
        await self.call.write(
            wire.draft_open_to_proto(DraftOpen(token_ids, sampling, seed, drafter))
        )
        return self

    async def send(
        self, keep_length: int, append: Sequence[int] = (), max_tokens: int = 8, round_id: int = 1
    ) -> None:
        advance = DraftAdvance(round_id, keep_length, append, max_tokens)
        await self.call.write(wire.draft_advance_to_proto(advance))

    async def read(self) -> DraftChunk:
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"stream ended: {await self.call.details()}")
        return wire.draft_chunk_from_proto(response)

    async def advance(
        self, keep_length: int, append: Sequence[int] = (), max_tokens: int = 8, round_id: int = 1
    ) -> list[DraftChunk]:
        await self.send(keep_length, append, max_tokens, round_id)
        chunks = [await self.read()]
        while not chunks[-1].last:
            chunks.append(await self.read())
        return chunks

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, whatever else it still sends."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


@dataclass
class Service:
    """A running draft service."""

    sessions: Sessions
    engine: Engine | None
    channel: grpc.aio.Channel
    port: int

    @property
    def stub(self) -> Any:
        return draft_pb2_grpc.DraftServiceStub(self.channel)

    def client(self) -> Client:
        return Client(self.stub)

    @property
    def active(self) -> int:
        return self.sessions.describe().sessions.active


StartService = Callable[..., AbstractAsyncContextManager[Service]]


@asynccontextmanager
async def start_service(settings: DraftSettings) -> AsyncIterator[Service]:
    """A draft service with these settings on a free port, and a channel to it."""
    sessions, engine = await build(settings)
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    server = rpc.GrpcServer("127.0.0.1", 0, [(add, DraftService(sessions))], [SERVICE_NAME])
    port = await server.start()
    await server.set_ready(True)
    try:
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            yield Service(sessions, engine, channel, port)
    finally:
        await server.stop(0)
        if engine is not None:
            await engine.stop()
