"""The draft service over gRPC: proposals, with distributions if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyspec import wire
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import TokenDistribution
from orchestrator.upstreams.connection import GrpcSession, GrpcUpstream, read, write
from orchestrator.upstreams.protocol import UNKNOWN, Correlation


class GrpcDraftUpstream(GrpcUpstream[DraftServiceInfo]):
    """The draft service at an address; `timeout_s` is for one proposal."""

    service = "draft service"
    _stub = draft_pb2_grpc.DraftServiceStub
    _describe = draft_pb2.DraftServiceDescribeRequest
    _info = DraftServiceInfo

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Make the target's tokenizer known to it. Raises `FlyspecError`."""
        async with self.attempt(self.timeout_s):
            facts = bundle.facts(vocab_size)
            messages = wire.tokenizer_messages(facts, bundle.tokenizer_json)
            await self.stub.AddTokenizer(iter(messages))

    def open(
        self, open_: DraftOpen, metrics: SpeculationMetrics, correlation: Correlation = UNKNOWN
    ) -> GrpcDraftSession:
        """A session, which begins with its first proposal."""
        return GrpcDraftSession(self, open_, metrics, correlation)


class GrpcDraftSession(GrpcSession[DraftOpen]):
    """Proposals. Of the sequence and the last one the service holds `_held` tokens at most."""

    _method = "Draft"
    _held = 0

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
        async with self._upstream.attempt(timeout_s):
            return await self._propose(sequence, max_tokens, round_id)

    async def _propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> DraftChunk:
        tokens = sequence.tokens
        await self._begin(tokens)
        traceparent = self._correlation.waits_for("draft", round_id)
        advance = wire.encode(
            DraftAdvance(round_id, self._synced, tokens[self._synced :], max_tokens, traceparent)
        )
        self._metrics.count_bytes(advance.ByteSize())
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
        whole = rest = message.ByteSize()
        if distributions:
            message.ClearField("distributions")
            rest = message.ByteSize()
        self._metrics.count_bytes(whole, whole - rest)
