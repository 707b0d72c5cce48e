"""The verify service and a generation's stream to it: rounds and their verdicts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.types import (
    DraftDistributions,
    RoundVerdict,
    TokenDistribution,
    TokenizerBundle,
    VerifyOpen,
    VerifyRound,
    VerifyServiceInfo,
)
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from orchestrator.attempt import DESCRIBE_TIMEOUT_S, RETRIED, Attempt, level_of, read, write
from orchestrator.upstreams.traffic import Traffic

log = logging.getLogger(__name__)

REOPEN_BACKOFF_S = (0.02, 0.1, 0.3, 1.0, 2.0)
"""Rests between tries to open a lost session again; the last one repeats."""
DISTRIBUTIONS_PIECE_BYTES = 1 << 20
"""Log-probabilities that go into one message; a longer distribution has one of its own."""


class VerifyUpstream:
    """The verify service at an address.

    `timeout_s` is for one answer; `reopen_timeout_s` is how long a generation waits for a service
    that was lost, which may have to load its model again.
    """

    def __init__(
        self, address: str, timeout_s: float, reopen_timeout_s: float | None = None
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.reopen_timeout_s = timeout_s if reopen_timeout_s is None else reopen_timeout_s
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

    def session(self, open_: VerifyOpen, traffic: Traffic) -> VerifySession:
        """A session, opened on its first round as `open_` says, with the tokens of then."""
        return VerifySession(self, open_, traffic)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class VerifySession:
    """One generation's stream to the verify service; `open_.token_ids` is filled in."""

    def __init__(self, upstream: VerifyUpstream, open_: VerifyOpen, traffic: Traffic) -> None:
        self._upstream = upstream
        self._open = open_
        self._traffic = traffic
        self._call: Any = None
        self._synced = 0  # tokens on which the service's sequence and ours agree

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        self._synced = min(self._synced, length)

    async def check(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> AsyncIterator[RoundVerdict]:
        """Verdicts on a round that follows `sequence`; several in plain decoding.

        `round_` comes without prefix: keep_length, append_token_ids and prefix_hash are filled in.
        `distributions` are those of its drafts, one each or none. When the service is lost, opens a
        new session with the whole sequence, until `reopen_timeout_s` are over. Verdicts already
        handed out stand; the rest of the round is then the caller's next round.
        """
        lost_at: float | None = None
        for backoff in chain(REOPEN_BACKOFF_S, repeat(REOPEN_BACKOFF_S[-1])):
            answered = False
            try:
                await self._send(sequence, round_, distributions)
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
                lost_at = lost_at or time.monotonic()
                if time.monotonic() + backoff - lost_at > self._upstream.reopen_timeout_s:
                    raise
                log.log(level_of(error), "reopening verify session: %s", error)
            await asyncio.sleep(backoff)

    async def _read(self, round_id: int) -> RoundVerdict:
        """The next verdict."""
        async with self._attempt():
            message = await read(self._call)
            self._traffic.count(message)
            verdict = wire.round_verdict_from_proto(message)
            if verdict.round_id != round_id:
                raise UnavailableError(f"answered round {verdict.round_id} instead of {round_id}")
        self._synced = verdict.keep_length + 1
        return verdict

    async def _send(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
    ) -> None:
        """Send a round with its prefix; on a new stream, open the session first."""
        tokens = sequence.tokens
        async with self._attempt():
            if self._call is None:
                self._call = self._upstream.stub.Verify()
                open_ = replace(self._open, token_ids=tokens)
                await write(self._call, wire.verify_open_to_proto(open_))
                self._synced = len(tokens)
            for piece in _pieces(round_.round_id, len(tokens), distributions):
                message = wire.distributions_to_proto(piece)
                self._traffic.count_distributions(message.ByteSize())
                await write(self._call, message)
            message = wire.verify_round_to_proto(
                replace(
                    round_,
                    keep_length=self._synced,
                    append_token_ids=tokens[self._synced :],
                    prefix_hash=sequence.hash,
                )
            )
            self._traffic.count(message)
            await write(self._call, message)

    def _attempt(self) -> Attempt:
        return Attempt("verify service", self._upstream.address, self._upstream.timeout_s)

    def close(self) -> None:
        """End the stream; the service frees the session."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


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
