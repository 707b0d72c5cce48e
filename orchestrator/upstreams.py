"""Streams to the draft and verify services: what they hold, deadlines, and opening them again.

A remote session is a cache (DESIGN, principle 1): when a stream is lost or holds another prefix,
the next call opens a new one with the whole sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import (
    FlyspecError,
    PrefixMismatchError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.prefix import TokenSequence
from flyspec.types import (
    DraftAdvance,
    DraftOpen,
    DraftServiceInfo,
    DraftTimings,
    Origin,
    RoundVerdict,
    Rule,
    SamplingParams,
    TokenizerBundle,
    VerifyOpen,
    VerifyRound,
    VerifyServiceInfo,
)
from flyspec.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from orchestrator.attempt import Attempt, read, write

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
DRAFT_BACKOFF_S = (0.0, 0.02, 0.1)
VERIFY_BACKOFF_S = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0, 4.0)
# A slot may still be closing when the next generation is admitted: full is worth another try.
RETRIED = (PrefixMismatchError, UnavailableError, ResourceExhaustedError)


@dataclass(slots=True)
class Proposal:
    """Tokens that a drafter guesses will follow; possibly none."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    timings: DraftTimings = field(default_factory=DraftTimings)


class DraftUpstream:
    """The draft service at an address."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._channel = rpc.connect(address)
        self.stub: Any = draft_pb2_grpc.DraftServiceStub(self._channel)

    async def describe(self) -> DraftServiceInfo:
        """What it drafts with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("draft service", self.address, DESCRIBE_TIMEOUT_S):
            return wire.draft_info_from_proto(
                await self.stub.Describe(draft_pb2.DraftServiceDescribeRequest())
            )

    def session(self, sampling: SamplingParams, seed: int, drafter: str) -> DraftSession:
        """A session, opened on its first proposal."""
        return DraftSession(self, sampling, seed, drafter)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class DraftSession:
    """One generation's stream to the draft service."""

    def __init__(
        self, upstream: DraftUpstream, sampling: SamplingParams, seed: int, drafter: str
    ) -> None:
        self._upstream = upstream
        self._sampling, self._seed, self._drafter = sampling, seed, drafter
        self._call: Any = None
        self._synced = 0  # tokens on which the service's sequence and ours agree
        self._held = 0  # tokens that the service holds and that may stand, its proposal included

    def accept(self, length: int) -> None:
        """Tell that the first `length` tokens of sequence and last proposal stand."""
        self._synced = self._held = min(length, self._held)

    async def propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        """Up to `max_tokens` tokens to follow `sequence`.

        Raises `FlyspecError` when the service fails on every attempt, each on a new stream.
        """
        upstream = self._upstream
        for backoff in DRAFT_BACKOFF_S:
            if backoff:
                await asyncio.sleep(backoff)
            try:
                async with Attempt("draft service", upstream.address, upstream.timeout_s):
                    return await self._propose(sequence, max_tokens, round_id)
            except RETRIED as error:
                self.close()
                last_error: FlyspecError = error
                log.log(_level(error), "reopening draft session: %s", error)
        raise last_error

    async def _propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        tokens = sequence.tokens
        if self._call is None:
            self._call = self._upstream.stub.Draft()
            await write(
                self._call,
                wire.draft_open_to_proto(
                    DraftOpen(tokens, self._sampling, self._seed, self._drafter)
                ),
            )
            self._synced = len(tokens)
        await write(
            self._call,
            wire.draft_advance_to_proto(
                DraftAdvance(round_id, self._synced, tokens[self._synced :], max_tokens)
            ),
        )
        proposal = Proposal()
        while True:
            chunk = wire.draft_chunk_from_proto(await read(self._call))
            expected = len(tokens) + len(proposal.token_ids)
            if chunk.round_id != round_id or chunk.start_position != expected:
                raise UnavailableError(
                    f"answered round {chunk.round_id} at position {chunk.start_position} "
                    f"instead of round {round_id} at {expected}"
                )
            proposal.token_ids += chunk.token_ids
            proposal.origins += chunk.origins
            if chunk.last:
                self._held = len(tokens) + len(proposal.token_ids)
                proposal.timings = chunk.timings
                return proposal

    def close(self) -> None:
        """End the stream; the service frees the session."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


class VerifyUpstream:
    """The verify service at an address."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._channel = rpc.connect(address)
        self.stub: Any = verify_pb2_grpc.VerifyServiceStub(self._channel)

    async def describe(self) -> VerifyServiceInfo:
        """What it verifies with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("verify service", self.address, DESCRIBE_TIMEOUT_S):
            return wire.verify_info_from_proto(
                await self.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
            )

    async def tokenizer(self) -> TokenizerBundle:
        """The target's tokenizer."""
        async with Attempt("verify service", self.address, self.timeout_s):
            call = self.stub.GetTokenizer(verify_pb2.GetTokenizerRequest())
            return wire.tokenizer_from_protos([message async for message in call])

    def session(
        self, prompt_length: int, rule: Rule, sampling: SamplingParams, seed: int
    ) -> VerifySession:
        """A session, opened on its first round."""
        return VerifySession(self, prompt_length, rule, sampling, seed)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class VerifySession:
    """One generation's stream to the verify service."""

    def __init__(
        self,
        upstream: VerifyUpstream,
        prompt_length: int,
        rule: Rule,
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        self._upstream = upstream
        self._open = (prompt_length, rule, sampling, seed)
        self._call: Any = None
        self._synced = 0

    async def check(
        self, sequence: TokenSequence, round_: VerifyRound
    ) -> AsyncIterator[RoundVerdict]:
        """Verdicts on a round that follows `sequence`; several in plain decoding.

        `round_` comes without prefix: keep_length, append_token_ids and prefix_hash are filled in.
        When the service is lost, opens a new session with the whole sequence, a few times. Verdicts
        already handed out stand; the rest of the round is then the caller's next round.
        """
        for backoff in VERIFY_BACKOFF_S:
            if backoff:
                await asyncio.sleep(backoff)
            answered = False
            try:
                await self._send(sequence, round_)
                while True:
                    verdict = await self._read(round_.round_id)
                    answered = True
                    yield verdict
                    if verdict.last:
                        return
            except RETRIED as error:
                self.close()
                if answered:
                    return
                last_error: FlyspecError = error
                log.log(_level(error), "reopening verify session: %s", error)
        raise last_error

    async def _read(self, round_id: int) -> RoundVerdict:
        """The next verdict."""
        async with self._attempt():
            verdict = wire.round_verdict_from_proto(await read(self._call))
            if verdict.round_id != round_id:
                raise UnavailableError(f"answered round {verdict.round_id} instead of {round_id}")
        self._synced = verdict.keep_length + 1
        return verdict

    async def _send(self, sequence: TokenSequence, round_: VerifyRound) -> None:
        """Send a round with its prefix; on a new stream, open the session first."""
        tokens = sequence.tokens
        async with self._attempt():
            if self._call is None:
                self._call = self._upstream.stub.Verify()
                await write(self._call, wire.verify_open_to_proto(VerifyOpen(tokens, *self._open)))
                self._synced = len(tokens)
            prefixed = replace(
                round_,
                keep_length=self._synced,
                append_token_ids=tokens[self._synced :],
                prefix_hash=sequence.hash,
            )
            await write(self._call, wire.verify_round_to_proto(prefixed))

    def _attempt(self) -> Attempt:
        return Attempt("verify service", self._upstream.address, self._upstream.timeout_s)

    def close(self) -> None:
        """End the stream; the service frees the session."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _level(error: FlyspecError) -> int:
    """A full service is everyday, a lost one is not."""
    return logging.DEBUG if isinstance(error, ResourceExhaustedError) else logging.WARNING
