"""The draft service over gRPC: proposals, with distributions if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flyspec import wire
from flyspec.errors import UnavailableError
from flyspec.prefix import num_same
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import MAX_SCORED, DraftAdvance, DraftChunk, DraftOpen
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
    """Proposals. The service holds `_synced` tokens and its last proposal."""

    _method = "Draft"
    _proposed: Sequence[int] = ()

    @property
    def held(self) -> int:
        """Tokens of the sequence that the service has read; the others it must read first."""
        return self._synced

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        if length < self._synced:
            self._synced, self._proposed = length, ()

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        """What follows `token_ids`, within `timeout_s`; they do not change meanwhile."""
        async with self._upstream.attempt(timeout_s):
            return await self._propose(token_ids, request)

    async def _propose(self, tokens: Sequence[int], request: DraftAdvance) -> DraftChunk:
        opens, round_id = self._call is None, request.round_id
        await self._begin(tokens)
        keep = self._synced + num_same(self._proposed, tokens[self._synced :])
        appended = tokens[keep:]
        request = replace(
            request,
            keep_length=keep,
            append_token_ids=appended,
            traceparent=self._correlation.waits_for("draft", round_id),
            score=request.score and not opens and 0 < len(appended) <= MAX_SCORED,
        )
        advance = wire.encode(request)
        self._synced, self._proposed = len(tokens), ()
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
        if (not request.score and proposal.agreements) or len(proposal.agreements) > len(appended):
            raise UnavailableError(f"scored {len(proposal.agreements)} of {len(appended)} tokens")
        self._proposed = proposal.token_ids
        return proposal

    def _count(self, message: Any, distributions: Sequence[TokenDistribution]) -> None:
        """Count a chunk's bytes; takes the distributions out of the message, which is read."""
        whole = rest = message.ByteSize()
        if distributions:
            message.ClearField("distributions")
            rest = message.ByteSize()
        self._metrics.count_bytes(whole, whole - rest)
