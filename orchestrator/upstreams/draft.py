"""The draft service over gRPC: proposals, with distributions if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
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


class GrpcDraftUpstream(GrpcUpstream):
    """The draft service at an address; `timeout_s` is for one proposal."""

    def __init__(self, address: str, timeout_s: float, link: rpc.Link | None = None) -> None:
        super().__init__(address, timeout_s, draft_pb2_grpc.DraftServiceStub, link)

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> DraftServiceInfo:
        """What it drafts with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("draft service", self.address, timeout_s):
            return wire.decode(
                DraftServiceInfo,
                await self.stub.Describe(draft_pb2.DraftServiceDescribeRequest()),
            )

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Make the target's tokenizer known to it. Raises `FlyspecError`."""
        async with Attempt("draft service", self.address, self.timeout_s):
            facts = bundle.facts(vocab_size)
            messages = wire.tokenizer_messages(facts, bundle.tokenizer_json)
            await self.stub.AddTokenizer(iter(messages))

    def open(
        self, open_: DraftOpen, traffic: Traffic, correlation: Correlation = UNKNOWN
    ) -> GrpcDraftSession:
        """A session, which begins with its first proposal."""
        return GrpcDraftSession(self, open_, traffic, correlation)


class GrpcDraftSession(GrpcSession):
    """One generation's stream to a draft service; `open_.token_ids` is filled in."""

    def __init__(
        self,
        upstream: Any,
        open_: DraftOpen,
        traffic: Traffic,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        super().__init__()
        self._upstream, self._open = upstream, open_
        self._traffic, self._correlation = traffic, correlation
        self._held = 0  # tokens that the service holds and that may stand, its proposal included

    @property
    def held(self) -> int:
        """Tokens of the sequence that the service has read; the others it must read first."""
        return self._synced

    def accept(self, length: int) -> None:
        """Tell that the first `length` tokens of sequence and last proposal stand."""
        self._synced = self._held = min(length, self._held)

    async def propose(
        self, sequence: TokenSequence, max_tokens: int, round_id: int, timeout_s: float
    ) -> DraftChunk:
        """Up to `max_tokens` tokens to follow `sequence`, within `timeout_s`."""
        async with Attempt("draft service", self._upstream.address, timeout_s):
            return await self._propose(sequence, max_tokens, round_id)

    async def _propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> DraftChunk:
        tokens = sequence.tokens
        if self._call is None:
            self._call = self._upstream.stub.Draft(metadata=self._correlation.metadata)
            open_ = replace(self._open, token_ids=tokens)
            await write(self._call, wire.encode(open_))
            self._synced = len(tokens)
        traceparent = self._correlation.waits_for("draft", round_id)
        advance = wire.encode(
            DraftAdvance(round_id, self._synced, tokens[self._synced :], max_tokens, traceparent)
        )
        self._traffic.count(advance.ByteSize())
        await write(self._call, advance)
        proposal = DraftChunk(start_position=len(tokens))
        while True:
            message = await read(self._call)
            chunk = wire.decode(DraftChunk, message)
            expected = len(tokens) + len(proposal.token_ids)
            if chunk.round_id != round_id or chunk.start_position != expected:
                raise UnavailableError(
                    f"answered round {chunk.round_id} at position {chunk.start_position} "
                    f"instead of round {round_id} at {expected}"
                )
            self._count(message, chunk.distributions)
            proposal = proposal.joined(chunk)
            if chunk.last:
                break
        if self._open.distribution and len(proposal.distributions) != len(proposal.token_ids):
            raise UnavailableError(
                f"sent {len(proposal.distributions)} distributions of "
                f"{len(proposal.token_ids)} drafts: run the same release of both"
            )
        self._held = len(tokens) + len(proposal.token_ids)
        return proposal

    def _count(self, message: Any, distributions: Sequence[TokenDistribution]) -> None:
        """Count a chunk's bytes; takes the distributions out of the message, which is read."""
        whole = message.ByteSize()
        if distributions:
            message.ClearField("distributions")
            self._traffic.count(whole, whole - message.ByteSize())
        else:
            self._traffic.count(whole)
