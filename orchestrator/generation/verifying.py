"""Obtains a generation's verdicts from any working replica of the target.

A remote session is a cache (DESIGN, principle 1): if it is lost or holds another prefix, the next
one gets the whole sequence.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count

from flyspec.draft_trees import main_path
from flyspec.errors import (
    FlyspecError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    PrefixMismatchError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from flyspec.prefix import TokenSequence
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import TokenDistribution
from orchestrator.fleet.heads import head_of
from orchestrator.fleet.replicas import Replica
from orchestrator.fleet.target_replicas import TargetReplicas
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.pooled_session import PooledSession
from orchestrator.upstreams.protocol import UNKNOWN, Correlation, VerifySession, VerifyUpstream

log = logging.getLogger(__name__)

REFUSALS = (InvalidArgumentError, NotFoundError, PermissionDeniedError, UnauthenticatedError)
"""No fault of the client's, since requests are checked first: messages damaged on their way, or
other software in between."""
MAX_REFUSALS = 3
"""Refusals of a round, each on a new stream, after which one more fails the generation."""
# A slot may still be closing when the next generation is admitted, so full is worth a retry.
RETRIED = (PrefixMismatchError, UnavailableError, ResourceExhaustedError, *REFUSALS)
REOPEN_BACKOFF_S = (0.02, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Maximum seconds between attempts to reopen a lost session; the last one repeats."""
SLOT_WAIT_S = 1.0
"""Seconds a session waits for a slot at one replica before considering the others again."""
FULL_GRACE_S = 0.01
"""Seconds a new generation retries when all replicas are full: slots may still be closing."""


class Verifying(PooledSession[VerifyUpstream, VerifySession]):
    """A generation's source of verdicts, with a session on one of `targets` at a time.

    If its replica is lost, another one, or the same one restarted, gets the whole sequence; it
    gives up after `reopen_timeout_s`.
    """

    def __init__(
        self,
        targets: TargetReplicas,
        plan: GenerationPlan,
        reopen_timeout_s: float,
        ledger: Ledger,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        super().__init__(plan.max_total_tokens, ledger, correlation)
        self._targets = targets
        rule, *other_rules = plan.judging.rules
        self._template = VerifyOpen(
            token_ids=(),
            prompt_length=len(plan.prompt_token_ids),
            rule=rule,
            other_rules=tuple(other_rules),
            sampling=plan.sampling,
            seed=plan.seed,
            logprobs=plan.reporting.logprobs,
            weights_fingerprint=targets.required_weights,
            numerics=targets.required_numerics,
            judge_fingerprint=targets.required_judge,
            stop_token_ids=sorted(plan.limits.stop_token_ids),
        )
        self._reopen_timeout_s = reopen_timeout_s
        self._avoided: list[Replica[VerifyUpstream]] = []  # full or failed when last tried
        self._staged: dict[int, VerifySession] = {}  # where rounds have been staged, by their ids

    async def reserve(self, tokens: Sequence[int]) -> None:
        """Get a slot at the target, taking turns with other orchestrators' generations.

        Without other orchestrators this does nothing, since admission counts the free slots itself.
        Raises `ResourceExhaustedError` if too many earlier requests are waiting.
        """
        began, refused = time.monotonic(), 0
        while self._session is None and any(r.shared for r in self._targets.usable):
            full = [r for r in self._targets.usable if r.full and r not in self._avoided]
            self._avoided = [*self._avoided, *full]
            session, replica = await self._begin(tokens)
            granted = False
            try:
                async with asyncio.timeout(SLOT_WAIT_S):
                    replica.learned(await session.wait_for_slot(tokens, self.waited_s))
                granted, self._avoided = True, []
            except TimeoutError:
                self._avoided = []
            except ResourceExhaustedError:
                self._avoided = [*self._avoided, replica]
                asked_all = all(r in self._avoided for r in self._targets.usable)
                if asked_all and time.monotonic() - began > FULL_GRACE_S:
                    raise
            except (UnavailableError, *REFUSALS) as error:
                self._trouble = self._trouble or (time.perf_counter_ns(), error)
                refused += isinstance(error, REFUSALS)
                if refused > MAX_REFUSALS or time.monotonic() - began > self._reopen_timeout_s:
                    raise _for_client(error) from None
                self._avoided = [replica]
                if isinstance(error, UnavailableError):
                    replica.failed(error)
            finally:
                if not granted:
                    self._close_session()
            if not granted:
                await asyncio.sleep(REOPEN_BACKOFF_S[0])

    @property
    def waited_s(self) -> float:
        return (time.perf_counter_ns() - self._ledger.arrived_ns) / 1e9

    @property
    def mixed_numerics(self) -> bool:
        return self._targets.mixed_numerics

    @property
    def takes_trees(self) -> bool:
        """True if the target takes trees of drafts."""
        return any(map(_takes_trees, self._targets.usable))

    def keep(self, length: int) -> None:
        """Record that the sequence was cut back to `length` tokens, whatever follows them now."""
        if self._session is not None:
            self._session.keep(length)

    @property
    def may_stage(self) -> bool:
        """True if the replica takes rounds that are staged for a verdict."""
        info = self._replica.info if self._replica is not None else None
        return info is not None and info.max_staged_rounds > 0

    async def stage(self, round_: VerifyRound) -> bool:
        """Stage a round, complete with its prefix; return whether it was sent.

        If its verdict comes, `check` needs not send it. May be cancelled.
        """
        session = self._session
        if session is None:
            return False
        try:
            await session.stage(round_)
        except FlyspecError:
            return False  # the session is lost, as `check` will find
        self._staged[round_.round_id] = session
        return True

    async def check(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> AsyncIterator[Verdict | None]:
        """Yield the verdicts on a round following `sequence`; several in plain decoding.

        Yields None once the request is sent, so that the caller can do other work meanwhile.
        `round_` and `distributions` are as in `VerifySession.send`. A round that the target has
        begun, since it was staged for its last verdict, is not sent. If the replica is lost,
        verdicts already yielded remain valid, and the caller's next round does the rest.
        """
        self._move_on(self._targets)
        begun_at = self._staged.pop(round_.round_id, None)
        if begun_at is None:
            self._staged.clear()
        refused = 0
        for attempt in count():
            answered = False
            began_ns = time.perf_counter_ns()
            try:
                if self._session is None:
                    await self.reserve(sequence.tokens)
                session, replica = self._session, self._replica
                if session is None or replica is None:
                    session, replica = await self._begin(sequence.tokens)
                if session is not begun_at:
                    await session.send(sequence, _for_replica(round_, replica), distributions)
                yield None
                while True:
                    verdict = await session.read(round_.round_id)
                    replica.breaker.succeeded()
                    answered = True
                    if self._trouble is not None:
                        self._recovered(replica, *self._trouble)
                    yield verdict
                    if verdict.last:
                        return
                    began_ns = time.perf_counter_ns()
            except RETRIED as error:
                self._lose(error)
                since_ns = self._trouble[0] if self._trouble else began_ns
                self._trouble = since_ns, error
                if answered:
                    return
                refused += isinstance(error, REFUSALS)
                trouble_s = (time.perf_counter_ns() - since_ns) / 1e9
                if refused > MAX_REFUSALS or trouble_s > self._reopen_timeout_s:
                    raise _for_client(error) from None
                full = isinstance(error, ResourceExhaustedError)  # routine, unlike a lost session
                level = logging.DEBUG if full else logging.WARNING
                log.log(level, "reopening verify session: %s", error)
            if attempt or full:
                rest = REOPEN_BACKOFF_S[min(attempt, len(REOPEN_BACKOFF_S) - 1)]
                await asyncio.sleep(rest * random.uniform(0.5, 1.0))

    async def verdict_of(self, round_id: int) -> Verdict | None:
        """Return the verdict on a round that the target has begun by itself; None if it is lost."""
        session, replica, began_ns = self._session, self._replica, time.perf_counter_ns()
        if session is None or replica is None:
            return None
        try:
            verdict = await session.read(round_id)
        except RETRIED as error:
            self._lose(error)
            self._trouble = self._trouble or (began_ns, error)
            log.warning("reopening verify session: %s", error)
            return None
        replica.breaker.succeeded()
        return verdict

    def _lose(self, error: FlyspecError) -> None:
        replica = self._replica
        self._close_session()
        if replica is None:
            return
        self._avoided = [replica]
        if isinstance(error, UnavailableError):
            replica.failed(error)

    def _recovered(self, replica: Replica[VerifyUpstream], since_ns: int, trouble: object) -> None:
        self._trouble, self._avoided = None, []
        self._ledger.recoveries.note(
            RecoveryKind.TARGET_REOPENED, since_ns, replica.address, trouble
        )

    async def _begin(self, tokens: Sequence[int]) -> tuple[VerifySession, Replica[VerifyUpstream]]:
        """Join a replica, waiting up to `reopen_timeout_s` until one is usable."""
        targets = self._targets
        deadline = time.monotonic() + self._reopen_timeout_s
        while (replica := targets.choose(tokens, self._weight, self._avoided)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise UnavailableError(f"no verify service is usable: {targets.pool.reason}")
            await targets.pool.changed(min(remaining, 0.05))
        session = self._join(replica, self._template)
        targets.joined(replica)
        return session, replica


def _for_client(error: FlyspecError) -> FlyspecError:
    """Return what the client is told of the target's last error: never that it did wrong."""
    if isinstance(error, REFUSALS):
        return FlyspecError(
            "the verify service refused what the orchestrator sent, which is no fault of the "
            f"request; send it again: {error}"
        )
    return UnavailableError(str(error)) if isinstance(error, PrefixMismatchError) else error


def _for_replica(round_: VerifyRound, replica: Replica[VerifyUpstream]) -> VerifyRound:
    """Return the round without what the replica does not have: a head, or trees of drafts."""
    if round_.draft_parents and not _takes_trees(replica):
        round_ = round_.along(main_path(round_.draft_parents))
    if round_.head is None or head_of(replica, round_.head.name):
        return round_
    return replace(round_, head=None)


def _takes_trees(replica: Replica[VerifyUpstream]) -> bool:
    return replica.info is not None and replica.info.takes_trees
