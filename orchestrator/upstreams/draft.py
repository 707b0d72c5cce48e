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
from flyspec.values.rounds import (
    MAX_SCORED,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
)
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
    """Proposals. The service holds `_synced` tokens and its last proposal.

    `_ahead` was asked for and its answer not read; it follows `_proposed`, until the sequence is
    cut back. Of answers to the rounds up to `_outdated`, nothing is wanted any more.
    """

    _method = "Draft"
    _proposed: Sequence[int] = ()
    _ahead: DraftAdvance | None = None
    _outdated = -1

    @property
    def held(self) -> int:
        """Tokens of the sequence that the service has read; the others it must read first."""
        return self._synced

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        if length < self._synced:
            self._synced, self._proposed = length, ()
            self._forget_ahead()

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        """What follows `token_ids`, within `timeout_s`; they do not change meanwhile."""
        async with self._upstream.attempt(timeout_s):
            if self._ahead is not None:
                proposal = await self._take_ahead(self._ahead, token_ids, request.max_tokens)
                if proposal is not None:
                    return proposal
            return await self._propose(token_ids, request)

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        """Have drafted what follows `length` tokens, which the last proposal has a part in."""
        if not 0 < length - self._synced <= len(self._proposed):
            return  # another session made that proposal
        async with self._upstream.attempt(self._upstream.timeout_s):
            self._proposed = self._proposed[: length - self._synced]
            self._ahead = request = replace(
                request,
                keep_length=length,
                traceparent=self._correlation.waits_for("draft", request.round_id),
            )
            await self._send(request)

    async def _take_ahead(
        self, ahead: DraftAdvance, tokens: Sequence[int], wanted: int
    ) -> DraftChunk | None:
        """The rest of what was drafted ahead, if the sequence went on as that did."""
        behind = tokens[self._synced :]
        length = len(self._proposed)
        if len(behind) != length + 1 or num_same(self._proposed, behind) < length:
            self._forget_ahead()
            return None
        proposal = await self._read(ahead, len(tokens) - 1)
        self._ahead = None
        drafted = proposal.token_ids
        self._proposed = [*self._proposed, *drafted]
        ended = len(drafted) < ahead.max_tokens  # nor would it have gone on for another question
        if len(drafted) < 2 or drafted[0] != behind[-1] or not (ended or len(drafted) > wanted):
            return None
        self._synced, self._proposed = len(tokens), drafted[1:]
        return replace(proposal.cut(1, 1 + wanted), ahead=True)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._outdated, self._ahead = self._ahead.round_id, None

    async def _propose(self, tokens: Sequence[int], request: DraftAdvance) -> DraftChunk:
        round_id = request.round_id
        if self._call is None:
            # Of what it reads at first it may be asked too, as far as that is no prompt.
            output = len(tokens) - (self._open.prompt_length or len(tokens))
            await self._begin(tokens[: len(tokens) - min(MAX_SCORED, output)])
        keep = self._synced + num_same(self._proposed, tokens[self._synced :])
        appended = tokens[keep:]
        request = replace(
            request,
            keep_length=keep,
            append_token_ids=appended,
            traceparent=self._correlation.waits_for("draft", round_id),
            score=request.score and 0 < len(appended) <= MAX_SCORED,
        )
        self._synced, self._proposed = len(tokens), ()
        await self._send(request)
        proposal = await self._read(request, len(tokens))
        self._proposed = proposal.token_ids
        return proposal

    async def _send(self, request: DraftAdvance) -> None:
        advance = wire.encode(request)
        self._metrics.count_bytes(advance.ByteSize())
        await write(self._call, advance)

    async def _read(self, request: DraftAdvance, start: int) -> DraftChunk:
        """The answer to a request, which begins at position `start`."""
        round_id, proposal = request.round_id, DraftChunk(start_position=start)
        while True:
            message = await read(self._call)
            chunk = wire.decode(DraftChunk, message)
            self._count(message, chunk.distributions)
            if chunk.round_id <= self._outdated:
                continue
            expected = start + len(proposal.token_ids)
            if chunk.round_id != round_id or chunk.start_position != expected:
                raise UnavailableError(
                    f"answered round {chunk.round_id} at position {chunk.start_position} "
                    f"instead of round {round_id} at {expected}"
                )
            proposal = proposal.joined(chunk)
            if chunk.last:
                break
        if self._open.distribution and len(proposal.distributions) != len(proposal.token_ids):
            raise UnavailableError(
                f"sent {len(proposal.distributions)} distributions of "
                f"{len(proposal.token_ids)} drafts: run the same release of both"
            )
        scored = len(request.append_token_ids) if request.score else 0
        if len(proposal.agreements) > scored:
            raise UnavailableError(f"scored {len(proposal.agreements)} of {scored} tokens")
        return proposal

    def _count(self, message: Any, distributions: Sequence[TokenDistribution]) -> None:
        """Count a chunk's bytes; takes the distributions out of the message, which is read."""
        whole = rest = message.ByteSize()
        if distributions:
            message.ClearField("distributions")
            rest = message.ByteSize()
        self._metrics.count_bytes(whole, whole - rest)
