"""The core loop: propose, check, extend the sequence; one `Round` at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from flyspec.prefix import TokenSequence
from flyspec.types import RoundVerdict, VerifyRound
from orchestrator.drafting import Drafting
from orchestrator.ledger import Ledger, Round, origins_of
from orchestrator.plan import GenerationPlan
from orchestrator.upstreams import Proposal, VerifySession


class Rounds:
    """The rounds of one generation, until the caller stops asking.

    The next proposal is asked for before a round is handed out: the drafter works while the caller
    turns tokens into text and sends it.
    """

    def __init__(
        self, plan: GenerationPlan, drafting: Drafting, verifying: VerifySession, ledger: Ledger
    ) -> None:
        self._plan = plan
        self._drafting, self._verifying = drafting, verifying
        self._ledger = ledger
        self._sequence = TokenSequence(plan.prompt_token_ids)
        self._round_id = 0
        self._started_ns = 0

    async def __aiter__(self) -> AsyncIterator[Round]:
        """Run rounds for ever; the caller leaves when its output is complete."""
        proposing = self._propose()
        try:
            while True:
                answered = proposing
                proposal = await answered
                request = self._request(proposal)
                async for verdict in self._verifying.check(self._sequence, request):
                    round_ = self._extend(proposal, verdict)
                    if verdict.last:
                        proposing = self._propose()
                        await asyncio.sleep(0)  # its request leaves before the caller works
                    yield round_
                if proposing is answered:
                    # The target was lost in the middle of plain decoding; go on from there.
                    proposing = self._propose()
        finally:
            proposing.cancel()

    @property
    def _remaining(self) -> int:
        """Tokens that the output still lacks; it may end earlier."""
        return self._plan.max_tokens + len(self._plan.prompt_token_ids) - len(self._sequence)

    def _propose(self) -> asyncio.Task[Proposal]:
        """Begin a round: ask for K tokens, or as many as are of use."""
        self._round_id += 1
        self._started_ns = time.perf_counter_ns()
        return asyncio.create_task(
            self._drafting.propose(self._sequence, self._draft_limit(), self._round_id)
        )

    def _draft_limit(self) -> int:
        """K of the next round: no more than fits the context, none after the output's end.

        An exact round near the end of the output drafts no more than can still be sent. A lossy
        one does not stop short: its verdict may depend on the drafts that follow, and the text
        must not depend on `max_tokens`.
        """
        plan = self._plan
        if self._remaining <= 0:
            return 0
        limit = min(plan.num_speculative_tokens, plan.context_length - len(self._sequence))
        if plan.rule.name == "exact":
            limit = min(limit, self._remaining - 1)
        return limit

    def _request(self, proposal: Proposal) -> VerifyRound:
        """The request to check a proposal, or to decode without one."""
        plain = 1
        if self._plan.num_speculative_tokens == 0:
            plain = max(1, min(self._plan.max_plain_tokens, self._remaining))
        return VerifyRound(
            round_id=self._round_id,
            keep_length=0,
            append_token_ids=(),
            draft_token_ids=proposal.token_ids,
            max_plain_tokens=plain,
            budget=self._ledger.budget(),
            exact_until_position=self._plan.exact_until_position,
        )

    def _extend(self, proposal: Proposal, verdict: RoundVerdict) -> Round:
        """Append what stands to the sequence."""
        num_accepted = verdict.keep_length - len(self._sequence)
        token_ids = [*proposal.token_ids[:num_accepted], verdict.next_token_id]
        self._drafting.accept(verdict.keep_length)
        self._sequence.extend(token_ids)
        now = time.perf_counter_ns()
        round_ns, self._started_ns = now - self._started_ns, now
        return Round(
            token_ids=token_ids,
            origins=origins_of(verdict, proposal.origins, num_accepted),
            verdict=verdict,
            draft_model_ns=proposal.timings.model_ns,
            round_ns=round_ns,
        )
