"""Where a generation's verdicts come from: whichever replica of the target works.

A remote session is a cache (DESIGN, principle 1): when it is lost or holds another prefix, the next
one gets the whole sequence.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count

from flyspec.errors import (
    FlyspecError,
    PrefixMismatchError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.prefix import TokenSequence
from flyspec.values.admin import BreakerState
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import TokenDistribution
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.recoveries import Recoveries
from orchestrator.upstreams.protocol import (
    UNKNOWN,
    Correlation,
    Traffic,
    VerifySession,
    VerifyUpstream,
)

log = logging.getLogger(__name__)

# A slot may still be closing when the next generation is admitted: full is worth another try.
RETRIED = (PrefixMismatchError, UnavailableError, ResourceExhaustedError)
REOPEN_BACKOFF_S = (0.02, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Longest rests between tries to open a lost session again; the last one repeats."""


class Verifying:
    """A generation's verdicts, of a session with one of `targets` at a time.

    When its replica is lost, another one, or the same one restarted, gets the whole sequence,
    until `reopen_timeout_s` are over.
    """

    def __init__(
        self,
        targets: Pool[VerifyUpstream],
        plan: GenerationPlan,
        reopen_timeout_s: float,
        traffic: Traffic,
        recoveries: Recoveries,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        self._targets = targets
        self._open = VerifyOpen(
            token_ids=(),
            prompt_length=len(plan.prompt_token_ids),
            rule=plan.rule,
            sampling=plan.sampling,
            seed=plan.seed,
            logprobs=plan.logprobs,
        )
        self._weight = plan.max_total_tokens
        self._reopen_timeout_s = reopen_timeout_s
        self._traffic, self._recoveries = traffic, recoveries
        self._correlation = correlation
        self._replica: Replica[VerifyUpstream] | None = None
        self._session: VerifySession | None = None  # with that replica
        self._avoided: list[Replica[VerifyUpstream]] = []  # full when they were tried last
        self._trouble: tuple[int, FlyspecError] | None = None  # before this round: since when, what

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""
        if self._session is not None:
            self._session.keep(length)

    async def check(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> AsyncIterator[Verdict]:
        """Verdicts on a round that follows `sequence`; several in plain decoding.

        `round_` and `distributions` as `VerifySession.send` takes them. Verdicts already handed out
        stand when the replica is lost; the rest of the round is then the caller's next round.
        """
        self._move_on()
        lost_ns, trouble = self._trouble or (0, None)
        self._trouble = None
        for attempt in count():
            answered = False
            began_ns = time.perf_counter_ns()
            try:
                session, replica = self._session, self._replica
                if session is None or replica is None:
                    session, replica = await self._begin(sequence.tokens)
                await session.send(sequence, round_, distributions)
                while True:
                    verdict = await session.read(round_.round_id)
                    if replica.breaker.state is not BreakerState.CLOSED and replica.info:
                        replica.breaker.succeeded()
                    answered = True
                    if trouble is not None:
                        self._recovered(replica, trouble, lost_ns)
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
            full = isinstance(trouble, ResourceExhaustedError)  # everyday, a lost one is not
            level = logging.DEBUG if full else logging.WARNING
            log.log(level, "reopening verify session: %s", trouble)
            if attempt or full:
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
        """The session is of no use any more."""
        replica = self._replica
        self.close()
        if replica is None:
            return
        self._avoided = [replica]
        if isinstance(error, UnavailableError):
            replica.failed()

    def _recovered(
        self, replica: Replica[VerifyUpstream], trouble: FlyspecError, lost_ns: int
    ) -> None:
        """The sequence is in a replica again."""
        self._avoided = []
        self._recoveries.note(RecoveryKind.TARGET_REOPENED, lost_ns, replica.address, trouble)

    async def _begin(self, tokens: Sequence[int]) -> tuple[VerifySession, Replica[VerifyUpstream]]:
        """A session with a replica; waits for one that can be used."""
        pool = self._targets
        deadline = time.monotonic() + self._reopen_timeout_s
        while (replica := pool.choose(tokens, self._weight, self._avoided)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                problems = [r.problem or "it failed a moment ago" for r in pool.replicas]
                raise UnavailableError(
                    f"no verify service can be used: {'; '.join(problems) or 'none is known'}"
                )
            await pool.changed(min(remaining, 0.05))
        session = replica.service.open(self._open, self._traffic, self._correlation)
        replica.join(session, self._weight)
        self._session, self._replica = session, replica
        return session, replica

    def close(self) -> None:
        """End the session; the service frees it."""
        session, replica = self._session, self._replica
        self._session = self._replica = None
        if session is not None and replica is not None:
            session.close()
            replica.leave(session)
