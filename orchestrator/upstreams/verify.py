"""The gRPC client of the verify service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flyspec import process, rpc, wire
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.values.admin import TokenizerBundle, VerifyServiceInfo
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import (
    DraftDistributions,
    SessionStatus,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import TokenDistribution
from orchestrator.upstreams.connection import (
    GrpcSession,
    GrpcUpstream,
    decoded,
    read,
    write,
)
from orchestrator.upstreams.protocol import UNKNOWN, Correlation

DISTRIBUTIONS_PIECE_BYTES = 1 << 20
"""Maximum size of the distributions in one message; a larger one gets a message to itself."""


class GrpcVerifyUpstream(GrpcUpstream[VerifyServiceInfo]):
    """A verify service at an address; `timeout_s` applies to each answer."""

    service = "verify service"
    _stub = verify_pb2_grpc.VerifyServiceStub
    _describe = verify_pb2.VerifyServiceDescribeRequest
    _info = VerifyServiceInfo
    orchestrator_id = process.describe().instance_id
    """Tells the service which orchestrator a session belongs to."""

    def _describe_request(self) -> Any:
        return self._describe(orchestrator_id=self.orchestrator_id)

    async def tokenizer(self) -> TokenizerBundle:
        async with self.attempt(self.timeout_s):
            call = self.stub.GetTokenizer(verify_pb2.GetTokenizerRequest())
            return wire.tokenizer_of([message async for message in call])

    def open(
        self, open_: VerifyOpen, metrics: SpeculationMetrics, correlation: Correlation = UNKNOWN
    ) -> GrpcVerifySession:
        open_ = replace(open_, orchestrator_id=self.orchestrator_id)
        return GrpcVerifySession(self, open_, metrics, correlation)


@dataclass(eq=False)
class GrpcVerifySession(GrpcSession[VerifyOpen]):
    """A session that sends rounds and reads their verdicts."""

    _method = "Verify"

    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def wait_for_slot(self, token_ids: Sequence[int], waited_s: float) -> SessionStatus:
        async with self._upstream.attempt(self._upstream.timeout_s):
            await self._begin(token_ids, waited_ms=round(1e3 * waited_s))
            granted: Verdict = decoded(Verdict, await read(self._call))
            if granted.sessions is None:
                raise UnavailableError("granted a slot without reporting its session counts")
            return granted.sessions

    def keep(self, length: int) -> None:
        self._synced = min(self._synced, length)

    async def send(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
    ) -> None:
        tokens = sequence.tokens
        async with self._upstream.attempt(self._upstream.timeout_s), self._writing:
            await self._begin(tokens)
            for piece in _pieces(round_.round_id, len(tokens), distributions):
                message = wire.encode(piece)
                size = message.ByteSize()
                self._metrics.count_bytes(size, size)
                await write(self._call, message)
            message = wire.encode(
                replace(
                    round_,
                    keep_length=self._synced,
                    append_token_ids=tokens[self._synced :],
                    prefix_hash=sequence.hash,
                    traceparent=self._correlation.waits_for("verify", round_.round_id),
                )
            )
            self._metrics.count_bytes(message.ByteSize())
            await write(self._call, message)
            self._synced = len(tokens)

    async def stage(self, round_: VerifyRound) -> None:
        message = wire.encode(replace(round_, traceparent=self._correlation.traceparent))
        self._metrics.count_bytes(message.ByteSize())
        await asyncio.shield(rpc.unhandled(asyncio.ensure_future(self._stage(message))))

    async def _stage(self, message: Any) -> None:
        async with self._upstream.attempt(self._upstream.timeout_s), self._writing:
            await write(self._call, message)

    async def read(self, round_id: int) -> Verdict:
        async with self._upstream.attempt(self._upstream.timeout_s):
            while True:
                message = await read(self._call)
                self._metrics.count_bytes(message.ByteSize())
                if message.round_id >= round_id:  # skip plain decoding that this round ended
                    break
            verdict: Verdict = decoded(Verdict, message, start_length=self._synced)
            if verdict.round_id != round_id:
                raise UnavailableError(f"answered round {verdict.round_id} instead of {round_id}")
        self._synced = verdict.keep_length + 1
        return verdict


def _pieces(
    round_id: int, first_position: int, distributions: Sequence[TokenDistribution]
) -> Iterator[DraftDistributions]:
    """Split a round's distributions into messages of about `DISTRIBUTIONS_PIECE_BYTES` each."""
    start = size = 0
    for index, distribution in enumerate(distributions):
        num_bytes = len(distribution.log_probs) + 4 * len(distribution.token_ids)
        if index > start and size + num_bytes > DISTRIBUTIONS_PIECE_BYTES:
            yield DraftDistributions(round_id, first_position + start, distributions[start:index])
            start, size = index, 0
        size += num_bytes
    if start < len(distributions):
        yield DraftDistributions(round_id, first_position + start, distributions[start:])
