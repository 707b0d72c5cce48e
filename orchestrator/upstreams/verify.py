"""The verify service and a generation's stream to it: rounds and their verdicts."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import FlyspecError, ResourceExhaustedError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from flyspec.values.admin import BreakerState, TokenizerBundle, VerifyServiceInfo
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import DraftDistributions, Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import TokenDistribution
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.generation.recoveries import Recoveries
from orchestrator.telemetry.correlation import UNKNOWN, Correlation
from orchestrator.upstreams.attempt import (
    DESCRIBE_TIMEOUT_S,
    RETRIED,
    Attempt,
    level_of,
    read,
    write,
)
from orchestrator.upstreams.connection import Upstream
from orchestrator.upstreams.traffic import Traffic

log = logging.getLogger(__name__)

REOPEN_BACKOFF_S = (0.02, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Longest rests between tries to open a lost session again; the last one repeats."""
DISTRIBUTIONS_PIECE_BYTES = 1 << 20
"""Log-probabilities that go into one message; a longer distribution has one of its own."""


class VerifyUpstream(Upstream):
    """The verify service at an address; `timeout_s` is for one answer."""

    def __init__(self, address: str, timeout_s: float, link: rpc.Link | None = None) -> None:
        super().__init__(address, timeout_s, verify_pb2_grpc.VerifyServiceStub, link)

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> VerifyServiceInfo:
        """What it verifies with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("verify service", self.address, timeout_s):
            return wire.verify_info_from_proto(
                await self.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
            )

    async def tokenizer(self) -> TokenizerBundle:
        """The target's tokenizer."""
        async with Attempt("verify service", self.address, self.timeout_s):
            call = self.stub.GetTokenizer(verify_pb2.GetTokenizerRequest())
            return wire.tokenizer_from_protos([message async for message in call])


class VerifySession:
    """One generation's stream to a replica of the verify service.

    `open_.token_ids` is filled in; `weight` is what the session adds to a replica's outstanding
    tokens. When its replica is lost, another one, or the same one restarted, gets the whole
    sequence.
    """

    def __init__(
        self,
        targets: Pool[VerifyUpstream],
        open_: VerifyOpen,
        traffic: Traffic,
        recoveries: Recoveries,
        reopen_timeout_s: float,
        weight: int = 1,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        self._targets = targets
        self._open = open_
        self._traffic, self._recoveries = traffic, recoveries
        self._correlation = correlation
        self._reopen_timeout_s, self._weight = reopen_timeout_s, weight
        self._replica: Replica[VerifyUpstream] | None = None
        self._avoided: list[Replica[VerifyUpstream]] = []  # full when they were tried last
        self._call: Any = None
        self._trouble: tuple[int, FlyspecError] | None = None  # before this round: since when, what
        self._synced = 0  # tokens on which the service's sequence and ours agree

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        self._synced = min(self._synced, length)

    async def check(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> AsyncIterator[Verdict]:
        """Verdicts on a round that follows `sequence`; several in plain decoding.

        `round_` comes without prefix: keep_length, append_token_ids and prefix_hash are filled in.
        `distributions` are those of its drafts, one each or none. When the service is lost, opens a
        new session with the whole sequence, until `reopen_timeout_s` are over. Verdicts already
        handed out stand; the rest of the round is then the caller's next round.
        """
        self._move_on()
        lost_ns, trouble = self._trouble or (0, None)
        self._trouble = None
        for attempt in count():
            answered, start_length = False, len(sequence)
            began_ns = time.perf_counter_ns()
            try:
                await self._send(sequence, round_, distributions)
                while True:
                    verdict = await self._read(round_.round_id, start_length)
                    start_length = verdict.keep_length + 1
                    answered = True
                    if trouble is not None:
                        self._recovered(trouble, lost_ns)
                        trouble = None
                    yield verdict
                    if verdict.last:
                        return
                    began_ns = time.perf_counter_ns()
            except RETRIED as error:
                self._lose(error)
                if answered:
                    self._trouble = began_ns, error
                    return
                trouble, lost_ns = error, lost_ns or began_ns
            waited_s = (time.perf_counter_ns() - lost_ns) / 1e9
            if waited_s > self._reopen_timeout_s:
                raise trouble
            log.log(level_of(trouble), "reopening verify session: %s", trouble)
            if attempt or isinstance(trouble, ResourceExhaustedError):
                rest = REOPEN_BACKOFF_S[min(attempt, len(REOPEN_BACKOFF_S) - 1)]
                await asyncio.sleep(rest * random.uniform(0.5, 1.0))

    def _move_on(self) -> None:
        """Leave a replica that takes nothing new any more, if another one does."""
        replica = self._replica
        if replica is None or replica.takes_new:
            return
        if any(other is not replica for other in self._targets.usable):
            self.close()
            reason = f"{replica.address} takes nothing new: {replica.problem or 'it left'}"
            self._trouble = time.perf_counter_ns(), UnavailableError(reason)

    def _lose(self, error: FlyspecError) -> None:
        """The stream is of no use any more."""
        replica = self._replica
        self.close()
        if replica is None:
            return
        self._avoided = [replica]
        if isinstance(error, UnavailableError):
            replica.failed()

    def _recovered(self, trouble: FlyspecError, lost_ns: int) -> None:
        """The sequence is in a replica again."""
        assert self._replica is not None
        self._avoided = []
        self._recoveries.note(RecoveryKind.TARGET_REOPENED, lost_ns, self._replica.address, trouble)

    async def _find(self, tokens: Sequence[int]) -> Replica[VerifyUpstream]:
        """A replica for the sequence; waits for one."""
        pool = self._targets
        deadline = time.monotonic() + self._reopen_timeout_s
        while True:
            replica = pool.choose(tokens, self._weight, self._avoided)
            if replica is not None:
                return replica
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                problems = [r.problem or "it failed a moment ago" for r in pool.replicas]
                raise UnavailableError(
                    f"no verify service can be used: {'; '.join(problems) or 'none is known'}"
                )
            await pool.changed(min(remaining, 0.05))

    async def _read(self, round_id: int, start_length: int) -> Verdict:
        """The next verdict, on what follows `start_length` tokens."""
        replica = self._replica
        assert replica is not None
        async with self._attempt(replica):
            message = await read(self._call)
            self._traffic.count(message)
            verdict = wire.decode(Verdict, message, start_length=start_length)
            if verdict.round_id != round_id:
                raise UnavailableError(f"answered round {verdict.round_id} instead of {round_id}")
        if replica.breaker.state is not BreakerState.CLOSED and replica.info is not None:
            replica.breaker.succeeded()
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
        if self._replica is None:
            self._replica = await self._find(tokens)
            self._replica.join(self, self._weight)
        replica = self._replica
        async with self._attempt(replica):
            if self._call is None:
                self._call = replica.service.stub.Verify(metadata=self._correlation.metadata)
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
                    traceparent=self._correlation.waits_for("verify", round_.round_id),
                )
            )
            self._traffic.count(message)
            await write(self._call, message)

    def _attempt(self, replica: Replica[VerifyUpstream]) -> Attempt:
        return Attempt("verify service", replica.address, replica.service.timeout_s)

    def cut(self) -> None:
        """End the stream from outside; whoever waits on it gets `UnavailableError`."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End the stream; the service frees the session."""
        self.cut()
        self._call = None
        if self._replica is not None:
            self._replica.leave(self)
            self._replica = None


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
