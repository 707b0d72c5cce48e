"""Exact twins: a sample of lossy outputs is decoded again, exactly and without drafts, to compare.

A lossy output may diverge from the exact one only at a token reported as loose. So twins measure
how much rules change outputs in production, and that nothing is loosened silently: divergence
before the first loose token is a violation. Twins use spare slots, one at a time, and yield to
every request. No text is kept or logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from flyspec.config import OrchestratorSettings
from flyspec.errors import FlyspecError
from flyspec.prefix import TokenSequence, num_same
from flyspec.rules import Rule
from flyspec.values.admin import BATCH_INVARIANT, ModelInfo
from flyspec.values.rounds import VerifyRound
from flyspec.values.tokens import Origin
from orchestrator.admission.admission import Admission
from orchestrator.fleet.fleet import Fleet
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import Token

log = logging.getLogger(__name__)

EXACT = Rule("exact")
PLAIN_TOKENS = 16
"""Tokens a twin decodes between checks for whether its slot is needed."""
BUSY = 0.5
"""Share of slots in use at or above which none are spare."""


class TwinOutcome(StrEnum):
    """The outcome of a twin; a metric label."""

    SAME = "same"
    DIFFERS = "differs"
    VIOLATION = "violation"
    GAVE_WAY = "gave_way"
    FAILED = "failed"


class ExactTwins:
    """Runs the orchestrator's twins, for a share of lossy outputs, if there are spare slots."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        settings: OrchestratorSettings,
        registry: CollectorRegistry,
    ) -> None:
        self._fleet, self._admission = fleet, admission
        self._share, self._reopen_timeout_s = settings.exact_twin_share, settings.reopen_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._outcomes = Counter(
            "flyspec_exact_twins",
            "Lossy outputs that were also decoded exactly, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in TwinOutcome:
            self._outcomes.labels(outcome)
        self._tokens = Counter(
            "flyspec_exact_twin_tokens",
            "Tokens of lossy outputs that were compared with exact ones.",
            registry=registry,
        )
        self._same = Counter(
            "flyspec_exact_twin_same_tokens",
            "Compared tokens before the first one that differs.",
            registry=registry,
        )

    def wants(self, plan: GenerationPlan) -> bool:
        """True if this generation's tokens are to be kept for `consider` (random)."""
        lossy = plan.drafts.num_speculative_tokens > 0 and not plan.judging.lossless
        return lossy and random.random() < self._share

    def consider(self, plan: GenerationPlan, target: ModelInfo, tokens: Sequence[Token]) -> None:
        """Compare a finished output, its tokens as reported to the client, if a slot is spare."""
        if self._task is None and self._has_room(0):
            self._task = asyncio.create_task(self._run(plan, target, tokens))
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("could not decode an exact twin", exc_info=error)

    def _has_room(self, own: int) -> bool:
        admission = self._admission
        busy = admission.active + own
        return not (admission.draining or admission.waiting) and busy < BUSY * admission.slots

    async def _run(self, plan: GenerationPlan, target: ModelInfo, tokens: Sequence[Token]) -> None:
        try:
            exact = await self._decode(plan, target, len(tokens))
        except FlyspecError as error:
            log.info("exact twin failed: %s", error)
            self._outcomes.labels(TwinOutcome.FAILED).inc()
            return
        if exact is None:
            self._outcomes.labels(TwinOutcome.GAVE_WAY).inc()
            return
        own = [token.token_id for token in tokens]
        same = num_same(own, exact)
        loose = (i for i, token in enumerate(tokens) if token.origin is Origin.LOOSE)
        first_loose = next(loose, len(own))
        self._tokens.inc(len(own))
        self._same.inc(same)
        outcome = TwinOutcome.SAME if same == len(own) else TwinOutcome.DIFFERS
        # Unless the target is batch-invariant, a near-tie may fall either way.
        if same < first_loose and BATCH_INVARIANT in target.numerics:
            outcome = TwinOutcome.VIOLATION
            log.error(
                "output of rule %s diverged from the exact output at token %d, before its first "
                "loose token, %d of %d: it was loosened silently", plan.judging.names, same,
                first_loose, len(own),
            )  # fmt: skip
        self._outcomes.labels(outcome).inc()

    async def _decode(
        self, lossy: GenerationPlan, target: ModelInfo, count: int
    ) -> list[int] | None:
        """Decode `count` tokens without drafts; return None if the slot was needed."""
        judging = replace(lossy.judging, rule=EXACT, phases=(), exact_inside=())
        reporting = replace(lossy.reporting, logprobs=None)
        plan = replace(lossy, judging=judging, reporting=reporting)
        targets = self._fleet.replicas_of(target)
        verifying = Verifying(targets, plan, self._reopen_timeout_s, Ledger())
        sequence = TokenSequence(plan.prompt_token_ids)
        start, round_id = len(sequence), 0
        limits = plan.limits
        ends = limits.stop_token_ids if limits.ignore_eos else limits.end_token_ids
        try:
            while (left := count - (len(sequence) - start)) > 0:
                if not self._has_room(1):
                    return None
                round_id += 1
                plain = min(PLAIN_TOKENS, limits.max_plain_tokens, left)
                request = VerifyRound(round_id, 0, (), (), max_plain_tokens=plain)
                async for verdict in verifying.check(sequence, request):
                    if verdict is not None:
                        sequence.extend([*verdict.plain_token_ids, verdict.next_token_id])
                if ends.intersection(sequence.tokens[start:]):
                    break
        finally:
            verifying.close()
        return list(sequence.tokens[start : start + count])
