"""Gets a generation's proposals from its drafter, or from a fallback.

The ladder (DESIGN, section 5): the assigned drafter, on any replica that works; the other drafters;
local prompt lookup. A round retries only within the time allowed for one proposal; a failed replica
is retried when its breaker allows.

A head of the target has its proposal ready: it came with the last verdict. In a relay, a draft
service goes on behind the part of it that `handover` keeps, and prompt lookup behind all of it
where that service has nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from flyspec.drafter_names import NEED_MODEL
from flyspec.errors import (
    FlyspecError,
    PrefixMismatchError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.prefix import num_same
from flyspec.values.admin import BreakerState, ModelInfo
from flyspec.values.generation import RecoveryKind
from flyspec.values.rounds import (
    MAX_TOP_TOKENS,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    HeadRequest,
    TopTokens,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import still_needed
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.drafters import Drafters
from orchestrator.fleet.handshake import drafter_vocab_size, is_foreign
from orchestrator.fleet.heads import TargetHead
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.generation.head_drafts import (
    MAX_BLOCK,
    MAX_MISSES,
    Handover,
    HeadDrafts,
    joined,
)
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.pooled_session import PooledSession
from orchestrator.generation.proposals import LocalLookup, fit_proposal
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import (
    UNKNOWN,
    Correlation,
    DraftSession,
    DraftUpstream,
    SilentError,
    time_limit_ms,
)

log = logging.getLogger(__name__)
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
FALLBACK = "local prompt lookup"


class Drafting(PooledSession[DraftUpstream, DraftSession]):
    """Gets the proposals of one generation, from the plan's drafter or the one assigned to it.

    `target` is the model to draft for; `sharing_scope` is as in `DraftOpen`. Rounds that repeat an
    earlier run's wait `repeat_timeout_s` for a proposal.
    """

    def __init__(
        self,
        drafters: Drafters,
        plan: GenerationPlan,
        target: ModelInfo,
        ledger: Ledger,
        correlation: Correlation = UNKNOWN,
        sharing_scope: str = "",
        repeat_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(plan.max_total_tokens, ledger, correlation)
        assigned = drafters.assign(plan.drafts.drafter)
        self._drafters, self._assigned = drafters, assigned
        self._by_name = bool(plan.drafts.drafter)
        self._template = DraftOpen(
            token_ids=(),
            sampling=plan.sampling,
            seed=plan.seed,
            prompt_length=len(plan.prompt_token_ids),
            distribution=plan.drafts.distribution,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
            sharing_scope=sharing_scope,
        )
        self._target, self._vocab_size = target, target.vocab_size
        self._ignore_eos = plan.limits.ignore_eos
        self._lookup = LocalLookup(plan.drafts.distribution is not None)
        self._from_head = HeadDrafts(replace(self._template, drafter_vocab_size=self._vocab_size))
        self._handover = Handover()
        self._lost_heads: set[TargetHead] = set()  # of no use to this generation
        self._block: tuple[int, Sequence[int]] = 0, ()
        """Position in the session's sequence of a head's block that was not verified then."""
        self._drafter = assigned
        self._unfit: set[RegisteredDrafter] = set()  # reported that they cannot draft this sequence
        self._failed: list[Replica[DraftUpstream]] = []  # in this round, not to be retried
        self._lost: list[Replica[DraftUpstream]] = []  # in this round
        self._num_lost: Counter[Replica[DraftUpstream]] = Counter()  # in all rounds
        self._swapped = ""  # why the operator moved the generation to another drafter
        self._last = ""  # drafter of the last proposal
        self._repeats, self._repeat_timeout_s = False, repeat_timeout_s
        self._began_ns = 0  # when this round's proposal was requested
        self._top_tokens: list[TopTokens] = []  # of which the drafter has not been told
        assigned.users.add(self)

    @property
    def assigned_name(self) -> str:
        return self._assigned.name

    @property
    def relative_size(self) -> float:
        """Parameters of the assigned draft model divided by the target's."""
        return self._assigned.relative_size(self._target)

    def num_top_tokens(self, proposal: DraftChunk) -> int:
        """Return how many likely tokens of a proposal's round the drafter is to learn."""
        drafter = self._drafter
        if not proposal.token_ids or is_foreign(drafter.model, self._target):
            return 0
        return drafter.num_top_tokens(proposal.origins)

    @property
    def max_proposals_ahead(self) -> int:
        """Maximum proposals that the drafter makes ahead; it would propose the same afterwards.

        Translated tokens depend on where a proposal begins.
        """
        drafter = self._drafter
        return 0 if is_foreign(drafter.model, self._target) else drafter.max_proposals_ahead

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, repeats: bool = False
    ) -> DraftChunk:
        """Propose a continuation of `token_ids`; drafter failures lead to a fallback.

        `keep_length` and `append_token_ids` of `request` are filled in by the session. `token_ids`
        must not change meanwhile. Where a round `repeats` one of an earlier run, it waits for its
        drafter as long as that is there, however slow.
        """
        self._began_ns, self._repeats = time.perf_counter_ns(), repeats
        self.look_around()
        self._failed.clear()
        self._lost.clear()
        if not self.reads_verdicts:
            if self._drafter.head is not None and self._drafter.pool is None:
                self._trouble = self._trouble or (self._began_ns, "its head is of no use now")
            proposal = await self._ask_services(token_ids, request, self._ladder())
            if proposal is not None:
                return proposal
        if self.reads_verdicts:
            return await self._beside_target(token_ids, request)
        return self._fall_back(token_ids, request.max_tokens)

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        """Request a draft of what follows `length` tokens, the last of which were just proposed.

        The next `propose` uses the result if possible, and handles any error.
        """
        session, limit = self._session, self._drafter.max_draft_tokens
        if session is not None and (limit is None or request.max_tokens <= limit):
            assert self._replica is not None
            limit_ms = self._time_limit_ms(self._replica.service.timeout_s)
            request = replace(request, time_limit_ms=limit_ms)
            with suppress(FlyspecError):
                await session.propose_ahead(length, request)

    # --- heads of the target ------------------------------------------------------------------

    @property
    def reads_verdicts(self) -> bool:
        """True if the current drafter's proposals come with verdicts, if they are requested."""
        return self._head_of(self._drafter) is not None

    @property
    def relays(self) -> bool:
        """True if another drafter goes on behind the head's proposals."""
        return self._drafter.head is not None and self._drafter.pool is not None

    def head_request(self, max_tokens: int, min_confidence: float) -> HeadRequest | None:
        """Return the request for the proposal that is to come with the next verdict, if any."""
        head = self._head_of(self._drafter)
        if head is None or max_tokens <= 0 or (info := head.info) is None:
            return None
        most = min(max_tokens, info.max_tokens)
        if (pool := self._drafter.pool) is not None and pool.usable:
            most = min(most, MAX_BLOCK)
        return HeadRequest(head.name, most, min_confidence, ignore_eos=self._ignore_eos)

    def received(self, request: HeadRequest | None, verdict: Verdict) -> None:
        """Take a head's proposal from a verdict on a round with that request."""
        with self._head_faults():
            self._from_head.received(request, verdict)

    def still_heads(self, request: HeadRequest) -> bool:
        """True if the head of a request is the one to draft with now, and it alone."""
        self.look_around()
        head = self._head_of(self._drafter)
        return head is not None and head.name == request.name and not self.relays

    def went_on(
        self, token_ids: Sequence[int], request: HeadRequest, verdict: Verdict
    ) -> DraftChunk | None:
        """Return the drafts behind `token_ids` of a round that the head went on with.

        There are none if the head failed. None if they are invalid.
        """
        drafter = self._drafter
        with self._head_faults():
            self._from_head.went_on(token_ids, request, verdict)
        if verdict.drafts and not verdict.drafts.token_ids:
            return DraftChunk(start_position=len(token_ids), drafter=drafter.name)
        return self.take_block(token_ids, request.max_tokens)

    @contextmanager
    def _head_faults(self) -> Iterator[None]:
        """Give up the drafter's head if the block says that it is of no use."""
        drafter = self._drafter
        try:
            yield
            reason = "" if self._from_head.misses < MAX_MISSES else "its proposals do not come"
        except DrafterFaultError as error:
            drafter.faults[error.fault] += 1
            reason = str(error)
        if reason and drafter.head is not None:
            log.warning("drafter %s: %s", drafter.name, reason)
            drafter.stats.failures_total += 1
            self._lost_heads.add(drafter.head)
            self._from_head.misses = 0

    def take_block(self, token_ids: Sequence[int], max_tokens: int) -> DraftChunk | None:
        """Return the head's proposal behind `token_ids`; None if none has come."""
        drafter, head = self._drafter, self._head_of(self._drafter)
        block = self._from_head.proposal_for(token_ids, max_tokens)
        if block is None or head is None or head.name != self._from_head.name:
            return None
        drafter.proposed(block.timings.model_ns)
        if drafter.pool is None or self._trouble is None:
            self._recovered(drafter, "the target")
        return replace(block, drafter=drafter.name, arrived_ns=time.perf_counter_ns())

    async def _beside_target(self, token_ids: Sequence[int], request: DraftAdvance) -> DraftChunk:
        """Return the head's proposal, extended in a relay; no tokens if none has come yet."""
        drafter = self._drafter
        block = self.take_block(token_ids, request.max_tokens)
        if block is None:
            block = DraftChunk(start_position=len(token_ids), drafter=drafter.name)
        if drafter.pool is None:
            return block
        self._handover.learn(token_ids)
        kept = self._handover.kept(block) if drafter.pool.usable else block
        missing = request.max_tokens - len(kept.token_ids)
        needed = still_needed(request.min_confidence, kept.confidences)
        if missing <= 0 or needed > 1:
            return kept
        behind = [*token_ids, *kept.token_ids]
        rest = replace(request, max_tokens=missing, min_confidence=needed, score=False)
        extension = await self._ask_services(behind, rest, [drafter])
        self._block = len(token_ids), kept.token_ids
        if extension is not None and extension.token_ids:
            self._handover.handed(block, kept, extension.token_ids[0])
        else:
            kept, behind = block, [*token_ids, *block.token_ids]
            missing = request.max_tokens - len(block.token_ids)
            extension = self._lookup.propose(behind, missing)
            self._lookup.keep(len(token_ids))
        whole = joined(kept, extension)
        return replace(whole, drafter=drafter.name, arrived_ns=time.perf_counter_ns())

    def _fall_back(self, token_ids: Sequence[int], max_tokens: int) -> DraftChunk:
        proposal = self._lookup.propose(token_ids, max_tokens)
        if self._drafter is not self._assigned:
            self._drafter.users.discard(self)
        self._drafter = self._drafters.lookup
        trouble, self._trouble = self._trouble, None
        if self._last != FALLBACK and self._assigned is not self._drafters.lookup:
            since_ns, reason = trouble or (self._began_ns, self._assigned.reason)
            self._ledger.recoveries.note(RecoveryKind.DRAFTER_FALLBACK, since_ns, FALLBACK, reason)
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
        self._from_head.keep(length)
        if self._session is not None:
            self._session.keep(length)

    def repeats(self, proposal: DraftChunk) -> bool:
        """Return whether the drafter, given part of its proposal, would propose the rest again.

        A head has to be told how the sequence goes on first.
        """
        drafter, spoken = self._drafter, self._template.tokenizer_fingerprint
        model = drafter.model
        if model is None or drafter.head is not None or drafter.name != proposal.drafter:
            return False
        if drafter.service_kind not in NEED_MODEL:
            return False
        return model.tokenizer_fingerprint == spoken  # else proposals are translated as text

    # --- draft services ---------------------------------------------------------------------

    async def next_ahead(self) -> DraftChunk | None:
        """Return the next proposal made ahead of the verdict on the last one, as it arrives.

        None if there will be no more. May be cancelled, but must not run during other methods.
        """
        session, began_ns = self._session, time.perf_counter_ns()
        if session is None:
            return None
        try:
            proposal = await session.next_ahead()
        except FlyspecError as error:
            if session is self._session:
                self._lose(error, began_ns)
            return None
        return self._named(proposal)

    async def confirm(
        self, token_ids: Sequence[int], proposal: DraftChunk, request: DraftAdvance
    ) -> DraftChunk:
        """Tell the drafter that the target verifies a proposal made ahead; return that."""
        self.look_around()
        session, began_ns = self._session, time.perf_counter_ns()
        if session is not None:
            try:
                await session.confirm(token_ids, proposal, request)
            except FlyspecError as error:
                self._lose(error, began_ns)
        return proposal

    def _named(self, proposal: DraftChunk) -> DraftChunk:
        now_ns = time.perf_counter_ns()
        proposal = replace(proposal, drafter=self._drafter.name, arrived_ns=now_ns)
        return fit_proposal(proposal, self._vocab_size)

    def learn(
        self, tokens: Sequence[int], round_: VerifyRound, top_token_ids: Sequence[int]
    ) -> None:
        """Tell the drafter with its next request what the target said in a round after `tokens`."""
        width = min(round_.num_top_tokens, self._vocab_size)
        rows = len(top_token_ids) // width
        context = [*tokens[-2:], *round_.draft_token_ids[: rows - 1]]
        if len(context) == rows + 1:
            parents = round_.draft_parents[: rows - 1]
            self._top_tokens.append(TopTokens(context, top_token_ids, parents))
            del self._top_tokens[:-MAX_TOP_TOKENS]

    def look_around(self) -> None:
        """Switch to the drafter and replica that should be used now, if usable."""
        wanted = self._drafters.current(self._assigned, self._by_name)
        if wanted is not self._assigned:
            self._swapped = f"{self._assigned.name} gave way to {wanted.name}"
            if self._drafter is not self._assigned or self._session is None:
                self._assigned.users.discard(self)
            self._assigned = wanted
            wanted.users.add(self)
        if self._drafter is not wanted:
            if self._can_use(wanted):
                self._close_session()
                self._switch(wanted)
        elif wanted.pool is not None:
            self._move_on(wanted.pool)

    def _switch(self, drafter: RegisteredDrafter) -> None:
        """Make a drafter the current one, of which this generation is a user."""
        if self._drafter is not self._assigned:
            self._drafter.users.discard(self)
        self._drafter = drafter
        drafter.users.add(self)

    def _can_use(self, drafter: RegisteredDrafter) -> bool:
        if self._head_of(drafter):
            return True
        if drafter.pool is None:
            return drafter.head is None
        return drafter not in self._unfit and bool(self._replicas(drafter.pool))

    def _replicas(self, pool: Pool[DraftUpstream]) -> list[Replica[DraftUpstream]]:
        """Return the replicas to draft with: to repeat a run, also those that rest after timeouts.

        Other drafts would not repeat it.
        """
        return pool.answering if self._repeats else pool.usable

    def _ladder(self) -> Iterator[RegisteredDrafter]:
        """Yield the drafters to try, up to a head of the target or to prompt lookup."""
        if self._repeats and self._assigned.pool is not None:
            yield self._assigned
        for drafter in self._drafters.ladder(self._assigned):
            if drafter.pool is None and drafter.head is None:
                return
            yield drafter

    def _open(self, rungs: Iterable[RegisteredDrafter]) -> bool:
        """Choose a drafter and a replica of its service; return False if there is none.

        Also stops at another drafter with a head of the target, which becomes the current one.
        """
        for drafter in rungs:
            if drafter is not self._drafter and self._head_of(drafter):
                self._switch(drafter)
                return False
            if drafter.pool is None or drafter in self._unfit:
                continue
            among = self._replicas(drafter.pool)
            replica = drafter.pool.choose((), self._weight, self._failed, among)
            if replica is None or replica in self._failed:
                continue
            self._switch(drafter)
            ids = drafter_vocab_size(drafter.model, self._target)
            self._join(
                replica,
                replace(self._template, drafter=drafter.service_kind, drafter_vocab_size=ids),
            )
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
        ahead = request.ahead if self.max_proposals_ahead else None
        tree = request.max_tree_tokens if drafter.makes_trees and drafter.head is None else 0
        if tree and is_foreign(drafter.model, self._target):
            tree = 0  # translated proposals are chains
        request = replace(
            request,
            max_tokens=wanted,
            top_tokens=self._top_tokens,
            ahead=ahead,
            max_tree_tokens=tree if limit is None else min(tree, limit),
            time_limit_ms=self._time_limit_ms(timeout_s),
        )
        self._top_tokens = []
        proposal = await session.propose(token_ids, request, timeout_s)
        replica.breaker.succeeded()
        self._recovered(drafter, replica.address)
        return proposal

    def _time_limit_ms(self, timeout_s: float) -> int:
        """Return when a proposal with that timeout ends; 0 (never) where it has to be repeated."""
        return 0 if self._repeats else time_limit_ms(timeout_s)

    def _recovered(self, drafter: RegisteredDrafter, where: str) -> None:
        """Record a recovery if this proposal follows a failure or another drafter's proposal."""
        trouble, self._trouble = self._trouble, None
        last, self._last = self._last, drafter.name
        swapped, self._swapped = self._swapped, ""
        if trouble is None and last in ("", drafter.name):
            return
        since_ns, reason = trouble or (self._began_ns, swapped or "available again")
        if swapped:
            kind = RecoveryKind.DRAFTER_SWAPPED
        elif last == drafter.name or (not last and drafter is self._assigned):
            kind = RecoveryKind.DRAFTER_REOPENED
        elif drafter is self._assigned:
            kind = RecoveryKind.DRAFTER_RESTORED
        else:
            kind = RecoveryKind.DRAFTER_REPLACED
        self._ledger.recoveries.note(kind, since_ns, f"{drafter.name} at {where}", reason)

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

    async def _ask_services(
        self, token_ids: Sequence[int], request: DraftAdvance, rungs: Iterable[RegisteredDrafter]
    ) -> DraftChunk | None:
        """Return the proposal of a draft service, that of the first of `rungs` that has one.

        None if there is none, or if a head of the target comes before it.
        """
        self._forget_block(token_ids)
        began_ns, rungs = self._began_ns, [*rungs]
        deadline: float | None = None
        for _ in range(MAX_TRIES):
            if deadline is not None and deadline - time.monotonic() < MIN_TRY_S:
                break
            if self._session is None and not self._open(rungs):
                break
            assert self._session is not None
            assert self._replica is not None
            unread = len(token_ids) - self._session.held
            allowed = self._replica.service.timeout_s + unread / READ_TOKENS_PER_S
            if self._repeats:
                allowed = max(allowed, self._repeat_timeout_s)
            now = time.monotonic()
            deadline = deadline or now + allowed
            timeout_s = min(allowed, deadline - now)
            try:
                proposal = await self._ask(token_ids, request, timeout_s)
            except FlyspecError as error:
                self._lose(error, began_ns)
                continue
            proposal = self._named(proposal)
            self._drafter.proposed(proposal.arrived_ns - began_ns)
            return proposal
        return None

    def _head_of(self, drafter: RegisteredDrafter) -> TargetHead | None:
        """Return the head that a drafter drafts with now, if any."""
        head = drafter.head
        return head if head and head not in self._lost_heads and head.usable else None

    def _forget_block(self, token_ids: Sequence[int]) -> None:
        """Take the part of the last block that is not in the sequence out of the session."""
        start, block = self._block
        same = num_same(block, token_ids[start : start + len(block)])
        if self._session is not None and same < len(block):
            self._session.keep(start + same)
        self._block = 0, ()

    def _close_session(self) -> None:
        if self._session is not None and self._drafter is not self._assigned:
            self._drafter.users.discard(self)
        super()._close_session()

    def close(self) -> None:
        super().close()
        for drafter in (self._drafter, self._assigned):
            drafter.users.discard(self)
