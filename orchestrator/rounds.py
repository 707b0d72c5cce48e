"""The core loop: propose, check, extend the sequence; one `Round` at a time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from flyspec.prefix import TokenSequence
from flyspec.types import RoundVerdict, VerifyRound
from orchestrator.drafting import Drafting
from orchestrator.ledger import Ledger, Round, origins_of
from orchestrator.output import Output
from orchestrator.plan import GenerationPlan
from orchestrator.upstreams import Proposal, VerifySession


class Rounds:
    """The rounds of one generation, until the caller stops asking."""

    def __init__(
        self,
        plan: GenerationPlan,
        drafting: Drafting,
        verifying: VerifySession,
        output: Output,
        ledger: Ledger,
    ) -> None:
        self._plan = plan
        self._drafting, self._verifying = drafting, verifying
        self._output, self._ledger = output, ledger
        self._sequence = TokenSequence(plan.prompt_token_ids)
        self._round_id = 0

    async def __aiter__(self) -> AsyncIterator[Round]:
        """Run rounds for ever; the caller leaves when its output is complete."""
        while True:
            self._round_id += 1
            started = time.perf_counter_ns()
            proposal = await self._drafting.propose(
                self._sequence, self._draft_limit(), self._round_id
            )
            async for verdict in self._verifying.check(self._sequence, self._round(proposal)):
                token_ids = self._extend(proposal, verdict)
                now = time.perf_counter_ns()
                yield Round(
                    token_ids=token_ids,
                    origins=origins_of(verdict, proposal.origins, len(token_ids) - 1),
                    verdict=verdict,
                    draft_model_ns=proposal.timings.model_ns,
                    round_ns=now - started,
                )
                started = now

    def _draft_limit(self) -> int:
        """K of the next round: no more than fits the context.

        An exact round near the end of the output drafts no more than can still be sent. A lossy
        one does not stop short: its verdict may depend on the drafts that follow, and the text
        must not depend on `max_tokens`.
        """
        limit = min(
            self._plan.num_speculative_tokens, self._plan.context_length - len(self._sequence)
        )
        if self._plan.rule.name == "exact":
            limit = min(limit, self._output.remaining - 1)
        return limit

    def _round(self, proposal: Proposal) -> VerifyRound:
        """The request to check a proposal, or to decode without one."""
        plain = 1
        if self._plan.num_speculative_tokens == 0:
            plain = min(self._plan.max_plain_tokens, self._output.remaining)
        return VerifyRound(
            round_id=self._round_id,
            keep_length=0,
            append_token_ids=(),
            draft_token_ids=proposal.token_ids,
            max_plain_tokens=max(1, plain),
            budget=self._ledger.budget(),
            exact_until_position=self._plan.exact_until_position,
        )

    def _extend(self, proposal: Proposal, verdict: RoundVerdict) -> list[int]:
        """Append what stands to the sequence; the tokens appended."""
        num_accepted = verdict.keep_length - len(self._sequence)
        token_ids = [*proposal.token_ids[:num_accepted], verdict.next_token_id]
        self._drafting.accept(verdict.keep_length)
        self._sequence.extend(token_ids)
        return token_ids
