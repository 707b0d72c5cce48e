"""Helpers of the draft service's tests: a driver, a client, a running service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import grpc

from draft_service.drafters.base import Scored
from draft_service.drafters.retrieval import prompt_lookup
from draft_service.server import SERVICE_NAME, build
from draft_service.service import DraftService
from draft_service.sessions import Engine, Sessions
from flyspec import rpc, wire
from flyspec.engine.model import Draw
from flyspec.engine.runner import ModelRunner
from flyspec.lookup.shared import Scopes
from flyspec.v1 import draft_pb2_grpc
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Drafted, SamplingParams

EOS = 1
GREEDY = SamplingParams()
SAMPLINGS = [GREEDY, SamplingParams(temperature=1.0), SamplingParams(0.7, top_p=0.9, top_k=20)]
PENALTIES = [
    SamplingParams(repetition_penalty=1.4, min_tokens=30, logit_bias=((EOS, 4.0), (9, 1.0))),
    SamplingParams(0.8, min_p=0.02, presence_penalty=0.6, frequency_penalty=1.0, min_tokens=12),
]
SPECS = [
    DistributionSpec(top_k, draw_from_it) for top_k in (0, 8) for draw_from_it in (False, True)
]


def lookup_drafter(max_length=0):
    """Return the drafter `prompt_lookup`."""
    return prompt_lookup(Scopes(), max_length)


class CountingRunner(ModelRunner):
    """A runner that counts its steps."""

    steps = 0

    def forward(self, steps):
        self.steps += len(steps)
        return super().forward(steps)


def run(runner, session, *asked):
    """Return scores and a whole proposal, as the engine would get them for one session."""
    scores, whole = [], Drafted([], [], [], [])
    work = session.propose(*asked)
    item = next(work, None)
    while item is not None:
        try:
            if isinstance(item, Draw):
                item = work.send(runner.draw([item])[0])
                continue
        except StopIteration:
            break
        if isinstance(item, Scored):
            scores.append(list(item.agreements))
        else:
            whole = whole.joined(item)
        item = next(work, None)
    return scores, whole


def drive(runner, session, max_tokens):
    """Return a proposal's tokens and origins."""
    return [*map(list, run(runner, session, max_tokens)[1][:2])]


def drive_all(runner, session, max_tokens):
    """As `drive`, with the distributions."""
    return [*map(list, run(runner, session, max_tokens)[1][:3])]


def tokens_of(chunks):
    return [token for chunk in chunks for token in chunk.token_ids]


class Client:
    """One `Draft` stream, in our types."""

    def __init__(self, stub):
        self.call = stub.Draft()
        self._rounds = 0

    async def open(
        self,
        token_ids,
        sampling=GREEDY,
        seed=1,
        drafter="",
        prompt_length=0,
        distribution=None,
        fingerprint="",
    ):
        open_ = DraftOpen(
            token_ids, sampling, seed, drafter, prompt_length, distribution, fingerprint
        )
        await self.call.write(wire.encode(open_))
        return self

    async def send(self, keep_length, append=(), max_tokens=8, round_id=None):
        """Request a proposal; rounds are numbered from 1 unless given."""
        self._rounds += 1
        round_id = self._rounds if round_id is None else round_id
        advance = DraftAdvance(round_id, keep_length, append, max_tokens)
        await self.call.write(wire.encode(advance))

    async def read(self):
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"stream ended: {await self.call.details()}")
        return wire.decode(DraftChunk, response)

    async def advance(self, keep_length, append=(), max_tokens=8, round_id=None):
        await self.send(keep_length, append, max_tokens, round_id)
        return await self.answer()

    async def answer(self):
        """Return the chunks of the next answer."""
        chunks = [await self.read()]
        while not chunks[-1].last:
            chunks.append(await self.read())
        return chunks

    async def status(self):
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
    def stub(self):
        return draft_pb2_grpc.DraftServiceStub(self.channel)

    def client(self):
        return Client(self.stub)

    @property
    def active(self):
        return self.sessions.describe().sessions.active


StartService = Callable[..., AbstractAsyncContextManager[Service]]


@asynccontextmanager
async def start_service(settings):
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
