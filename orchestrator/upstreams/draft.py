"""The gRPC client of the draft service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.config import TOKENIZER_TIMEOUT_S
from flyspec.errors import FlyspecError, InvalidArgumentError
from flyspec.prefix import num_same
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import MAX_SCORED, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import TokenDistribution
from orchestrator.upstreams.connection import (
    DESCRIBE_TIMEOUT_S,
    GrpcSession,
    GrpcUpstream,
    error_of_end,
    read,
    write,
)
from orchestrator.upstreams.proposal_checks import Answer, DraftFault, check_description
from orchestrator.upstreams.protocol import UNKNOWN, Correlation, SilentError, UnreadableError
from orchestrator.upstreams.pushed import PushedProposals

log = logging.getLogger(__name__)


class GrpcDraftUpstream(GrpcUpstream[DraftServiceInfo]):
    """A draft service at an address; `timeout_s` applies to each proposal."""

    service = "draft service"
    tokenizer_timeout_s = TOKENIZER_TIMEOUT_S
    """Seconds for preparing a tokenizer, which takes far longer than a proposal."""
    _stub = draft_pb2_grpc.DraftServiceStub
    _describe = draft_pb2.DraftServiceDescribeRequest
    _info = DraftServiceInfo

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> DraftServiceInfo:
        """Query the service's description. Raises `UnavailableError` if missing or invalid."""
        info = await super().describe(timeout_s)
        async with self.attempt(timeout_s):
            check_description(info)
        return info

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        log.info("%s at %s prepares the target's tokenizer", self.service, self.address)
        began, limit_s = time.monotonic(), self.tokenizer_timeout_s
        try:
            async with self.attempt(limit_s):
                facts = bundle.facts(vocab_size)
                messages = wire.tokenizer_messages(facts, bundle.tokenizer_json)
                await self.stub.AddTokenizer(iter(messages))
        except SilentError:
            raise SilentError(
                f"{self.service} at {self.address} did not prepare the target's tokenizer within "
                f"{limit_s:g} s; raise --tokenizer-timeout-s of the orchestrator"
            ) from None
        seconds = time.monotonic() - began
        log.info("%s at %s was ready after %.1f s", self.service, self.address, seconds)

    def open(
        self, open_: DraftOpen, metrics: SpeculationMetrics, correlation: Correlation = UNKNOWN
    ) -> GrpcDraftSession:
        return GrpcDraftSession(self, open_, metrics, correlation)


@dataclass(eq=False)
class GrpcDraftSession(GrpcSession[DraftOpen]):
    """A session that requests proposals. The service holds `_synced` tokens and its last proposal.

    `_owed` are the outstanding answers in order, of which only the last is still of interest.
    `_ahead` is a draft-ahead request whose answer has not been read; it continues `_proposed`, and
    is void once the sequence is truncated. `_pushed` are the proposals made ahead of the verdict on
    `_proposed`. A message that is being read outlives whoever waits for it.
    """

    _method = "Draft"

    _proposed: Sequence[int] = field(default=(), init=False)
    _ahead: DraftAdvance | None = field(default=None, init=False)
    _owed: deque[Answer] = field(default_factory=deque, init=False)
    _answered: bool = field(default=False, init=False)
    _pushed: PushedProposals | None = field(default=None, init=False)
    _max_pushed_bytes: int = field(default=0, init=False)
    _last: Answer = field(init=False)
    _reading: asyncio.Future[Any] | None = field(default=None, init=False)

    @property
    def held(self) -> int:
        return self._synced

    def keep(self, length: int) -> None:
        if length < self._synced:
            self._synced, self._proposed, self._ahead = length, (), None
            self._pushed = None

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        async with self._upstream.attempt(timeout_s):
            if self._ahead is not None:
                proposal = await self._take_ahead(self._ahead, token_ids, request.max_tokens)
                if proposal is not None:
                    return proposal
            if (pushed := self._take_pushed(token_ids)) is not None:
                proposal = replace(pushed.cut(0, request.max_tokens), round_id=request.round_id)
                await self._confirm(token_ids, pushed, proposal, request)
                return proposal
            return await self._propose(token_ids, request)

    async def next_ahead(self) -> DraftChunk:
        while True:
            chunk = await self._chunk(keeps=True)
            if not chunk.ahead:
                self._answer(chunk)
            elif (pushed := self._pushed) is not None and pushed.expects(chunk):
                if self._owed and chunk.round_id == self._owed[0].round_id:
                    self._owed[0].refuse(DraftFault.CHUNKS, "a proposal ahead before its last one")
                if (proposal := pushed.add(chunk, time.perf_counter_ns())) is not None:
                    return proposal

    async def confirm(
        self, token_ids: Sequence[int], proposal: DraftChunk, request: DraftAdvance
    ) -> None:
        async with self._upstream.attempt(self._upstream.timeout_s):
            if (pushed := self._take_pushed(token_ids)) is not None:
                await self._confirm(token_ids, pushed, proposal, request)

    def _take_pushed(self, tokens: Sequence[int]) -> DraftChunk | None:
        """Return the proposal made ahead that builds on `tokens`, if it is there."""
        if self._pushed is None:
            return None
        before, behind = len(tokens) - 1, tokens[self._synced : -1]
        if num_same(self._proposed, behind) < len(behind):
            return None
        return self._pushed.following(before, tokens[-1])

    async def _confirm(
        self,
        tokens: Sequence[int],
        pushed: DraftChunk,
        proposal: DraftChunk,
        request: DraftAdvance,
    ) -> None:
        """Go on behind the part of a pushed proposal that is verified, if more are wanted."""
        if request.ahead is None:
            self._pushed = None
            return
        drafts = proposal.token_ids
        whole = len(drafts) == len(pushed.token_ids)
        request = replace(
            request,
            keep_length=len(tokens) - 1,
            append_token_ids=[tokens[-1], *drafts],
            max_tokens=0,
            min_confidence=0.0,
            score=False,
            top_tokens=(),
            ahead=request.ahead._replace(
                num_unverified=len(drafts), unverified_ahead_id=pushed.ahead_id if whole else 0
            ),
            traceparent=self._correlation.waits_for("draft", request.round_id),
        )
        self._synced, self._proposed = len(tokens), drafts
        await self._send(request, drafts[-1])

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        if not 0 < length - self._synced <= len(self._proposed):
            return  # that proposal came from another session
        async with self._upstream.attempt(self._upstream.timeout_s):
            self._proposed = behind = self._proposed[: length - self._synced]
            self._ahead = request = replace(
                request,
                keep_length=length,
                traceparent=self._correlation.waits_for("draft", request.round_id),
            )
            await self._send(request, behind[-1])

    async def _take_ahead(
        self, ahead: DraftAdvance, tokens: Sequence[int], wanted: int
    ) -> DraftChunk | None:
        """Return the rest of the tokens drafted ahead, or None if the sequence went another way."""
        behind = tokens[self._synced :]
        length = len(self._proposed)
        if len(behind) != length + 1 or num_same(self._proposed, behind) < length:
            self._ahead = None
            return None
        proposal = await self._read()
        self._ahead = None
        drafted = proposal.token_ids
        self._proposed = [*self._proposed, *drafted]
        ended = len(drafted) < ahead.max_tokens  # asking again would not yield more
        if len(drafted) < 2 or drafted[0] != behind[-1] or not (ended or len(drafted) > wanted):
            return None
        self._synced, self._proposed = len(tokens), drafted[1:]
        return replace(proposal.cut(1, 1 + wanted), ahead=True)

    async def _propose(self, tokens: Sequence[int], request: DraftAdvance) -> DraftChunk:
        round_id = request.round_id
        if self._call is None:
            # Leave the last output tokens to be appended by the request, so they can be scored.
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
        await self._send(request, tokens[-1])
        proposal = await self._read()
        # A tree does not become part of the session's sequence.
        self._proposed = () if proposal.parents else proposal.token_ids
        return proposal

    async def _send(self, request: DraftAdvance, next_token_id: int) -> None:
        """Send a request for what follows a sequence that ends with `next_token_id`."""
        advance, now_ns = wire.encode(request), time.perf_counter_ns()
        self._metrics.count_bytes(advance.ByteSize())
        self._last = Answer(request, self._open, next_token_id, now_ns)
        self._owed.append(self._last)
        if self._pushed is not None and request.ahead and request.ahead.unverified_ahead_id:
            self._pushed.confirmed(request, now_ns)
        else:
            self._pushed = None
        if request.ahead is not None and self._pushed is None:
            self._pushed = PushedProposals(request, self._open, now_ns)
        if self._pushed is not None:
            self._max_pushed_bytes = max(self._max_pushed_bytes, self._pushed.max_bytes)
        try:
            await write(self._call, advance)
        except (FlyspecError, grpc.aio.AioRpcError) as error:
            await self._check_end(error)
            raise

    async def _read(self) -> DraftChunk:
        """Return the answer to the last request. Raises `DrafterFaultError`."""
        while True:
            chunk = await self._chunk()
            # What was made ahead of earlier verdicts may still be on its way.
            if not chunk.ahead and (proposal := self._answer(chunk)) is not None:
                return proposal

    def _answer(self, chunk: DraftChunk) -> DraftChunk | None:
        """Add a chunk to the first answer owed; return the last answer once it is complete."""
        if not self._owed:
            self._last.refuse(DraftFault.ROUND, f"a second answer for round {chunk.round_id}")
        answer = self._owed[0]
        answer.add(chunk, time.perf_counter_ns())
        if not answer.complete:
            return None
        self._owed.popleft()
        self._answered = True
        return None if self._owed else answer.proposal

    async def _chunk(self, keeps: bool = False) -> DraftChunk:
        """Return the next chunk. Raises `DrafterFaultError` if it is unreadable or too large.

        With `keeps`, this may be cancelled: the next call returns the chunk.
        """
        answer = self._expected
        try:
            message = await self._next(keeps)
            answer.check_size(message.ByteSize(), self._max_pushed_bytes)
            chunk = wire.decode(DraftChunk, message)
        except (UnreadableError, InvalidArgumentError) as error:
            answer.refuse(DraftFault.UNREADABLE, str(error))
        self._count(message, chunk.distributions)
        return chunk

    @property
    def _expected(self) -> Answer:
        """The answer that comes next, or the last one if all have come."""
        return self._owed[0] if self._owed else self._last

    async def _next(self, keeps: bool) -> Any:
        try:
            if keeps and self._reading is None:
                self._reading = rpc.unhandled(asyncio.ensure_future(read(self._call)))
            if self._reading is None:
                return await read(self._call)
            reading = self._reading
            await asyncio.wait((reading,))
            self._reading = None
            return reading.result()
        except UnreadableError:
            raise
        except (FlyspecError, grpc.aio.AioRpcError) as error:
            await self._check_end(error)
            raise

    async def _check_end(self, error: Exception) -> None:
        """Raise `DrafterFaultError` if a stream may not end this way."""
        code = await self._call.code()
        if isinstance(error, grpc.aio.AioRpcError):
            error = error_of_end(code, error.details() or "")
        assert isinstance(error, FlyspecError)
        status = code.name if code is grpc.StatusCode.OK else error.status
        self._expected.check_end(status, str(error), not self._answered)

    def _count(self, message: Any, distributions: Sequence[TokenDistribution]) -> None:
        """Count a chunk's bytes. Clears the distributions of the message, already decoded."""
        whole = rest = message.ByteSize()
        if distributions:
            message.ClearField("distributions")
            rest = message.ByteSize()
        self._metrics.count_bytes(whole, whole - rest)
