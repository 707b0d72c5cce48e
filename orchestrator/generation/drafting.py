"""Gets a generation's proposals from its drafter, or from a fallback.

A head of the target has its proposal ready: it came with the last verdict. In a relay, a draft
service goes on behind the part of it that `handover` keeps, and prompt lookup behind all of it
where that service has nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from flyspec.drafter_names import LOOKUP, NEED_MODEL
from flyspec.errors import FlyspecError
from flyspec.values.admin import ModelInfo
from flyspec.values.generation import RecoveryKind, SpeculationMetrics
from flyspec.values.rounds import DraftAdvance, DraftChunk, HeadRequest, Verdict
from flyspec.values.tokens import still_needed
from orchestrator.fleet.drafters import Drafters
from orchestrator.generation.handover import MAX_BLOCK, Handover
from orchestrator.generation.head_drafts import MAX_MISSES, HeadDrafts, joined
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.proposals import LocalLookup, fit_proposal
from orchestrator.generation.recoveries import Recoveries
from orchestrator.generation.service_drafting import ServiceDrafting
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import UNKNOWN, Correlation

log = logging.getLogger(__name__)

FALLBACK = "local prompt lookup"


class Drafting(ServiceDrafting):
    """Gets the proposals of one generation, from the plan's drafter or the one assigned to it."""

    def __init__(
        self,
        drafters: Drafters,
        plan: GenerationPlan,
        target: ModelInfo,
        metrics: SpeculationMetrics,
        recoveries: Recoveries,
        correlation: Correlation = UNKNOWN,
        sharing_scope: str = "",
        repeat_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(
            drafters, plan, target, metrics, recoveries, correlation, sharing_scope,
            repeat_timeout_s,
        )  # fmt: skip
        self._lookup = LocalLookup(plan.distribution is not None)
        self._from_head = HeadDrafts(replace(self._template, drafter_vocab_size=self._vocab_size))
        self._handover = Handover()
        self._ignore_eos = plan.ignore_eos

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
        """Whether the current drafter's proposals come with verdicts, if they are requested."""
        return self._head_of(self._drafter) is not None

    @property
    def relays(self) -> bool:
        """Whether another drafter goes on behind the head's proposals."""
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
        """Whether the head of a request is the one to draft with now, and it alone."""
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
        block = self._from_head.take(token_ids, max_tokens)
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
        proposal = replace(proposal, drafter=LOOKUP, arrived_ns=time.perf_counter_ns())
        if self._drafter is not self._assigned:
            self._drafter.users.discard(self)
        self._drafter = self._drafters.lookup
        trouble, self._trouble = self._trouble, None
        if self._last != FALLBACK and self._assigned is not self._drafters.lookup:
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
