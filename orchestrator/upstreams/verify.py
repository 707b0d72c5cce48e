"""The verify service over gRPC: rounds and their verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.values.admin import TokenizerBundle, VerifyServiceInfo
from flyspec.values.rounds import DraftDistributions, Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import TokenDistribution
from orchestrator.upstreams.connection import (
    DESCRIBE_TIMEOUT_S,
    Attempt,
    GrpcSession,
    GrpcUpstream,
    read,
    write,
)
from orchestrator.upstreams.protocol import UNKNOWN, Correlation, Traffic

DISTRIBUTIONS_PIECE_BYTES = 1 << 20
"""Log-probabilities that go into one message; a longer distribution has one of its own."""


class GrpcVerifyUpstream(GrpcUpstream):
    """The verify service at an address; `timeout_s` is for one answer."""

    def __init__(self, address: str, timeout_s: float, link: rpc.Link | None = None) -> None:
        super().__init__(address, timeout_s, verify_pb2_grpc.VerifyServiceStub, link)

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> VerifyServiceInfo:
        """What it verifies with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("verify service", self.address, timeout_s):
            return wire.decode(
                VerifyServiceInfo,
                await self.stub.Describe(verify_pb2.VerifyServiceDescribeRequest()),
            )

    async def tokenizer(self) -> TokenizerBundle:
        """The target's tokenizer."""
        async with Attempt("verify service", self.address, self.timeout_s):
            call = self.stub.GetTokenizer(verify_pb2.GetTokenizerRequest())
            return wire.tokenizer_of([message async for message in call])

    def open(
        self, open_: VerifyOpen, traffic: Traffic, correlation: Correlation = UNKNOWN
    ) -> GrpcVerifySession:
        """A session, which begins with its first round."""
        return GrpcVerifySession(self, open_, traffic, correlation)


class GrpcVerifySession(GrpcSession):
    """One generation's stream to a verify service; `open_.token_ids` is filled in."""

    def __init__(
        self,
        upstream: Any,
        open_: VerifyOpen,
        traffic: Traffic,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        super().__init__()
        self._upstream, self._open = upstream, open_
        self._traffic, self._correlation = traffic, correlation

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        self._synced = min(self._synced, length)

    async def send(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
    ) -> None:
        """Send a round with its prefix; before the first, open the session."""
        tokens = sequence.tokens
        async with self._attempt():
            if self._call is None:
                self._call = self._upstream.stub.Verify(metadata=self._correlation.metadata)
                open_ = replace(self._open, token_ids=tokens)
                await write(self._call, wire.encode(open_))
                self._synced = len(tokens)
            for piece in _pieces(round_.round_id, len(tokens), distributions):
                message = wire.encode(piece)
                size = message.ByteSize()
                self._traffic.count(size, size)
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
            self._traffic.count(message.ByteSize())
            await write(self._call, message)
            self._synced = len(tokens)

    async def read(self, round_id: int) -> Verdict:
        """The next verdict."""
        async with self._attempt():
            message = await read(self._call)
            self._traffic.count(message.ByteSize())
            verdict = wire.decode(Verdict, message, start_length=self._synced)
            if verdict.round_id != round_id:
                raise UnavailableError(f"answered round {verdict.round_id} instead of {round_id}")
        self._synced = verdict.keep_length + 1
        return verdict

    def _attempt(self) -> Attempt:
        return Attempt("verify service", self._upstream.address, self._upstream.timeout_s)


def _pieces(
    round_id: int, first_position: int, distributions: Sequence[TokenDistribution]
) -> Iterator[DraftDistributions]:
    """Distributions of a round in messages of about `DISTRIBUTIONS_PIECE_BYTES` at most."""
    start = size = 0
    for index, distribution in enumerate(distributions):
        num_bytes = len(distribution.log_probs) + 4 * len(distribution.token_ids)
        if index > start and size + num_bytes > DISTRIBUTIONS_PIECE_BYTES:
            yield DraftDistributions(round_id, first_position + start, distributions[start:index])
            start, size = index, 0
        size += num_bytes
    if start < len(distributions):
        yield DraftDistributions(round_id, first_position + start, distributions[start:])
