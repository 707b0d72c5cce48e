"""Helpers of the draft service's tests: a driver, a client, a running service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from draft_service.drafters.base import DrafterSession
from draft_service.drafters.retrieval import RetrievalDrafter, prompt_lookup
from draft_service.server import SERVICE_NAME, build
from draft_service.service import DraftService
from draft_service.sessions import Engine, Sessions
from flyspec import rpc, wire
from flyspec.config import DraftSettings
from flyspec.engine.model import Rows, Step
from flyspec.engine.runner import ModelRunner
from flyspec.lookup.shared import Scopes
from flyspec.v1 import draft_pb2_grpc
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Drafted, Origin, SamplingParams, TokenDistribution

CONTEXT_LENGTH = 160
VOCAB_SIZE = 300
EOS = 0
GREEDY = SamplingParams()
SAMPLINGS = [GREEDY, SamplingParams(temperature=1.0), SamplingParams(0.7, top_p=0.9, top_k=20)]
PENALTIES = [
    SamplingParams(repetition_penalty=1.4, min_tokens=30, logit_bias=((EOS, 4.0), (9, 1.0))),
    SamplingParams(0.8, min_p=0.02, presence_penalty=0.6, frequency_penalty=1.0, min_tokens=12),
]
SPECS = [
    DistributionSpec(top_k, draw_from_it) for top_k in (0, 8) for draw_from_it in (False, True)
]


def lookup_drafter(max_length: int = 0) -> RetrievalDrafter:
    """Return the drafter `prompt_lookup`."""
    return prompt_lookup(Scopes(), max_length)


class CountingRunner(ModelRunner):
    """A runner that counts its steps."""

    steps = 0

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.steps += len(steps)
        return super().forward(steps)


def drive(
    runner: ModelRunner, session: DrafterSession, max_tokens: int
) -> tuple[list[int], list[Origin]]:
    """Return a whole proposal, as the engine would create it for one session."""
    tokens, origins, _ = drive_all(runner, session, max_tokens)
    return tokens, origins


def drive_all(
    runner: ModelRunner, session: DrafterSession, max_tokens: int
) -> tuple[list[int], list[Origin], list[TokenDistribution]]:
    """As `drive`, with the distributions."""
    tokens: list[int] = []
    origins: list[Origin] = []
    distributions: list[TokenDistribution] = []
    work = session.propose(max_tokens)
    drawn: Drafted | None = None
    while True:
        try:
            item = next(work) if drawn is None else work.send(drawn)
        except StopIteration:
            return tokens, origins, distributions
        drawn = None
        if isinstance(item, Drafted):
            tokens += item.token_ids
            origins += item.origins
            distributions += item.distributions
        else:
            (drawn,) = runner.draw([item])


def tokens_of(chunks: Sequence[DraftChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


class Client:
    """One `Draft` stream, in our types."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Draft()
        self._rounds = 0

    async def open(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        seed: int = 1,
        drafter: str = "",
        prompt_length: int = 0,
        distribution: DistributionSpec | None = None,
        fingerprint: str = "",
    ) -> Client:
        open_ = DraftOpen(
            token_ids, sampling, seed, drafter, prompt_length, distribution, fingerprint
        )
        await self.call.write(wire.encode(open_))
        return self

    async def send(
        self,
        keep_length: int,
        append: Sequence[int] = (),
        max_tokens: int = 8,
        round_id: int | None = None,
    ) -> None:
        """Request a proposal; rounds are numbered from 1 unless given."""
        self._rounds += 1
        round_id = self._rounds if round_id is None else round_id
        advance = DraftAdvance(round_id, keep_length, append, max_tokens)
        await self.call.write(wire.encode(advance))

    async def read(self) -> DraftChunk:
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"stream ended: {await self.call.details()}")
        return wire.decode(DraftChunk, response)

    async def advance(
        self,
        keep_length: int,
        append: Sequence[int] = (),
        max_tokens: int = 8,
        round_id: int | None = None,
    ) -> list[DraftChunk]:
        await self.send(keep_length, append, max_tokens, round_id)
        chunks = [await self.read()]
        while not chunks[-1].last:
            chunks.append(await self.read())
        return chunks

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Return how the stream ended, ignoring what else it sends."""
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
    server = rpc.GrpcServer(
        "127.0.0.1",
        0,
        [(add, DraftService(sessions))],
        [SERVICE_NAME],
        max_request_bytes=rpc.max_request_bytes(sessions.max_length),
    )
    port = await server.start()
    await server.set_ready(True)
    try:
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            yield Service(sessions, engine, channel, port)
    finally:
        await server.stop(0)
        if engine is not None:
            await asyncio.to_thread(engine.stop)
