"""Gets a generation's proposals from its drafter, or from a fallback.

The ladder (DESIGN, section 5): the assigned drafter, on any replica that works; the other drafters;
local prompt lookup. A round retries only within the time allowed for one proposal; a failed replica
is retried when its breaker allows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from flyspec.drafter_names import LOOKUP
from flyspec.errors import (
    FlyspecError,
    PrefixMismatchError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.values.admin import BreakerState, ModelInfo
from flyspec.values.generation import RecoveryKind, SpeculationMetrics
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.drafters import Drafters
from orchestrator.fleet.handshake import drafter_vocab_size
from orchestrator.fleet.replicas import Replica
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.pooled_session import PooledSession
from orchestrator.generation.proposals import LocalLookup, fit_proposal
from orchestrator.generation.recoveries import Recoveries
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import (
    UNKNOWN,
    Correlation,
    DraftSession,
    DraftUpstream,
    SilentError,
)

log = logging.getLogger(__name__)

FALLBACK = "local prompt lookup"
REOPENED = 2
"""Maximum times a round reopens a lost stream to the same replica."""
MAX_LOST = 8
"""Streams to one replica that a generation may lose before each counts as the replica's failure."""
MAX_TRIES = 6
"""Maximum tries per round: two replicas, each with reopened streams."""
READ_TOKENS_PER_S = 1000
"""Minimum prompt processing speed assumed of a drafter, to extend its timeout."""
MIN_TRY_S = 0.05
"""Minimum seconds left for another try."""


class Drafting(PooledSession[DraftUpstream, DraftSession]):
    """Gets the proposals of one generation, from the plan's drafter or the one assigned to it.

    `target` is the model to draft for.
    """

    def __init__(
        self,
        drafters: Drafters,
        plan: GenerationPlan,
        target: ModelInfo,
        metrics: SpeculationMetrics,
        recoveries: Recoveries,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        super().__init__(plan.max_total_tokens, metrics, recoveries, correlation)
        assigned = drafters.assign(plan.drafter)
        self._drafters, self._assigned, self._by_name = drafters, assigned, bool(plan.drafter)
        self._template = DraftOpen(
            token_ids=(),
            sampling=plan.sampling,
            seed=plan.seed,
            prompt_length=len(plan.prompt_token_ids),
            distribution=plan.distribution,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
        )
        self._target, self._vocab_size = target, target.vocab_size
        self._lookup = LocalLookup(plan.distribution is not None)
        self._drafter = assigned
        self._unfit: set[RegisteredDrafter] = set()  # reported that they cannot draft this sequence
        self._failed: list[Replica[DraftUpstream]] = []  # in this round, not to be retried
        self._lost: list[Replica[DraftUpstream]] = []  # in this round
        self._num_lost: Counter[Replica[DraftUpstream]] = Counter()  # in all rounds
        self._swapped = ""  # why the operator moved the generation to another drafter
        self._last = ""  # drafter of the last proposal
        self._began_ns = 0  # when this round's proposal was requested
        assigned.users.add(self)

    @property
    def assigned_name(self) -> str:
        return self._assigned.name

    @property
    def relative_size(self) -> float:
        """Parameters of the assigned draft model divided by the target's."""
        return self._assigned.relative_size(self._target)

    async def propose(self, token_ids: Sequence[int], request: DraftAdvance) -> DraftChunk:
        """Propose a continuation of `token_ids`; drafter failures lead to a fallback.

        `keep_length` and `append_token_ids` of `request` are filled in by the session. `token_ids`
        must not change meanwhile.
        """
        began_ns = self._began_ns = time.perf_counter_ns()
        self._look_around()
        self._failed.clear()
        self._lost.clear()
        deadline: float | None = None
        for _ in range(MAX_TRIES):
            if deadline is not None and deadline - time.monotonic() < MIN_TRY_S:
                break
            if self._session is None and not self._open():
                break
            assert self._session is not None
            assert self._replica is not None
            unread = len(token_ids) - self._session.held
            allowed = self._replica.service.timeout_s + unread / READ_TOKENS_PER_S
            now = time.monotonic()
            deadline = deadline or now + allowed
            timeout_s = min(allowed, deadline - now)
            try:
                proposal = await self._ask(token_ids, request, timeout_s)
            except FlyspecError as error:
                self._lose(error, began_ns)
                continue
            now_ns = time.perf_counter_ns()
            self._drafter.stats.proposal_ns_total += now_ns - began_ns
            proposal = replace(proposal, drafter=self._drafter.name, arrived_ns=now_ns)
            return fit_proposal(proposal, self._vocab_size)
        return self._fall_back(token_ids, request.max_tokens)

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        """Request a draft of what follows `length` tokens, the last of which were just proposed.

        The next `propose` uses the result if possible, and handles any error.
        """
        session, limit = self._session, self._drafter.max_draft_tokens
        if session is not None and (limit is None or request.max_tokens <= limit):
            with suppress(FlyspecError):
                await session.propose_ahead(length, request)

    def _look_around(self) -> None:
        """Switch to the drafter and replica that should be used now, if usable."""
        wanted = self._drafters.current(self._assigned, self._by_name)
        if wanted is not self._assigned:
            self._swapped = f"{self._assigned.name} gave way to {wanted.name}"
            if self._drafter is not self._assigned or self._session is None:
                self._assigned.users.discard(self)
            self._assigned = wanted
            wanted.users.add(self)
        if self._drafter is not wanted:
            if wanted not in self._unfit and wanted.usable:
                self._close_session()
                self._drafter = wanted
        elif wanted.pool is not None:
            self._move_on(wanted.pool)

    def _open(self) -> bool:
        """Choose a drafter and a replica; return False if only local prompt lookup is left."""
        for drafter in self._drafters.ladder(self._assigned):
            if drafter.pool is None:
                break
            if drafter in self._unfit:
                continue
            replica = drafter.pool.choose((), self._weight, self._failed)
            if replica is None or replica in self._failed:
                continue
            self._drafter = drafter
            ids = drafter_vocab_size(drafter.model, self._target)
            self._join(
                replica, replace(self._template, drafter=drafter.kind, drafter_vocab_size=ids)
            )
            drafter.users.add(self)
            return True
        return False

    async def _ask(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        session, replica, drafter = self._session, self._replica, self._drafter
        assert session is not None
        assert replica is not None
        limit = drafter.max_draft_tokens
        wanted = request.max_tokens if limit is None else min(request.max_tokens, limit)
        request = replace(request, max_tokens=wanted)
        proposal = await session.propose(token_ids, request, timeout_s)
        replica.breaker.succeeded()
        self._recovered(drafter, replica)
        return proposal

    def _recovered(self, drafter: RegisteredDrafter, replica: Replica[DraftUpstream]) -> None:
        """Record a recovery if this proposal follows a failure or another drafter's proposal."""
        trouble, self._trouble = self._trouble, None
        last, self._last = self._last, drafter.name
        swapped, self._swapped = self._swapped, ""
        if trouble is None and last in ("", drafter.name):
            return
        since_ns, reason = trouble or (self._began_ns, swapped or "available again")
        if swapped:
            kind = RecoveryKind.DRAFTER_SWAPPED
        elif last in ("", drafter.name):
            kind = RecoveryKind.DRAFTER_REOPENED
        elif drafter is self._assigned:
            kind = RecoveryKind.DRAFTER_RESTORED
        else:
            kind = RecoveryKind.DRAFTER_REPLACED
        self._recoveries.note(kind, since_ns, f"{drafter.name} at {replica.address}", reason)

    def _lose(self, error: FlyspecError, began_ns: int) -> None:
        drafter, replica = self._drafter, self._replica
        assert replica is not None
        log.log(
            logging.WARNING if isinstance(error, UnavailableError) else logging.DEBUG,
            "drafter %s: %s",
            drafter.name,
            error,
        )
        self._close_session()
        self._trouble = self._trouble or (began_ns, error)
        drafter.stats.failures_total += isinstance(error, UnavailableError)
        if isinstance(error, DrafterFaultError):  # a new stream would not help
            drafter.faults[error.fault] += 1
            self._failed.append(replica)
            replica.faulted(str(error))
            return
        lost = isinstance(error, PrefixMismatchError | UnavailableError)
        final = isinstance(error, SilentError) or replica.breaker.state is not BreakerState.CLOSED
        self._num_lost[replica] += lost
        final = final or self._num_lost[replica] > MAX_LOST
        if lost and not final and self._lost.count(replica) < REOPENED:
            self._lost.append(replica)  # maybe only the stream, not the service
            return
        self._failed.append(replica)
        if lost:
            replica.failed(error)
        elif not isinstance(error, ResourceExhaustedError):
            self._unfit.add(drafter)

    def _fall_back(self, token_ids: Sequence[int], max_tokens: int) -> DraftChunk:
        proposal = replace(self._lookup.propose(token_ids, max_tokens), drafter=LOOKUP)
        self._drafter = self._drafters.lookup
        trouble, self._trouble = self._trouble, None
        if self._last != FALLBACK and self._assigned.pool is not None:
            since_ns, reason = trouble or (self._began_ns, self._assigned.reason)
            self._recoveries.note(RecoveryKind.DRAFTER_FALLBACK, since_ns, FALLBACK, reason)
        self._last = FALLBACK
        return fit_proposal(proposal, self._vocab_size)

    def record(
        self, drafter: str, num_drafted: int, num_accepted: int, num_emitted: int, round_ns: int
    ) -> None:
        stats = self._drafters.stats_of(drafter)
        if stats is not None:
            stats.count(num_drafted, num_accepted)
            stats.num_emitted_tokens += num_emitted
            stats.round_ns_total += round_ns

    def keep(self, length: int) -> None:
        """Record that the sequence was truncated to `length` tokens, and may have grown again."""
        self._lookup.keep(length)
        if self._session is not None:
            self._session.keep(length)

    def repeats(self, proposal: DraftChunk) -> bool:
        """Return whether the drafter, given part of its proposal, would propose the rest again."""
        drafter, spoken = self._drafter, self._template.tokenizer_fingerprint
        model = drafter.model
        if model is None or drafter.name != proposal.drafter:
            return False
        return model.tokenizer_fingerprint == spoken  # else proposals are translated as text

    def _close_session(self) -> None:
        if self._session is not None and self._drafter is not self._assigned:
            self._drafter.users.discard(self)
        super()._close_session()

    def close(self) -> None:
        super().close()
        self._assigned.users.discard(self)
