"""The core loop: propose, check, extend the sequence; one round at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from flyspec.prefix import TokenSequence
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import DraftChunk, VerifyRound
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.recoveries import Recoveries
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import (
    Checked,
    Command,
    Commit,
    Event,
    Extend,
    NothingDrafted,
    RollBack,
    WindowState,
    step,
)


class Rounds:
    """The rounds of one generation, until the caller stops asking.

    The next proposal is asked for before a round is handed out: the drafter works while the caller
    turns tokens into text and sends it.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        drafting: Drafting,
        verifying: Verifying,
        ledger: Ledger,
        recoveries: Recoveries,
    ) -> None:
        self._plan = plan
        self._recoveries = recoveries
        self._drafting, self._verifying = drafting, verifying
        self._ledger = ledger
        self._sequence = TokenSequence(plan.prompt_token_ids)
        self._prompt_length = len(plan.prompt_token_ids)
        self._state = WindowState(
            self._prompt_length, self._prompt_length + plan.max_tokens, plan.eager
        )
        self._loop_guard = LoopGuard() if plan.loop_guard else None
        self._exact_from: int | None = None
        self._round_id = 0
        self._started_ns = 0

    async def run(self) -> AsyncGenerator[RoundOutcome]:
        """Run rounds for ever; the caller leaves when its output is complete."""
        proposing = self._propose()
        try:
            while True:
                answered = proposing
                proposal = await answered
                if self._state.window and not proposal.token_ids:
                    round_ = self._advance(NothingDrafted(), proposal)
                    proposing = self._propose()
                    await asyncio.sleep(0)
                    self._watch(round_.commands)
                    yield round_
                    continue
                request = self._request(proposal)
                async for verdict in self._verifying.check(
                    self._sequence, request, proposal.distributions
                ):
                    checked = Checked(verdict, proposal.token_ids, proposal.origins)
                    round_ = self._advance(checked, proposal, request)
                    if verdict.last:
                        proposing = self._propose()
                        await asyncio.sleep(0)  # its request leaves before the caller works
                    self._watch(round_.commands)
                    yield round_
                if proposing is answered:
                    # The target was lost in the middle of plain decoding; go on from there.
                    proposing = self._propose()
        finally:
            proposing.cancel()

    def loop_guard_index(self, num_tokens: int) -> int | None:
        """Tokens of an output of `num_tokens` after which all was judged exactly for its loop.

        None if it did not begin to repeat itself.
        """
        guard = self._loop_guard
        if self._exact_from is None or guard is None or guard.token_index is None:
            return None
        if guard.token_index > num_tokens:
            return None
        return min(self._exact_from, num_tokens)

    @property
    def _remaining(self) -> int:
        """Tokens that the output still lacks; it may end earlier."""
        return self._state.limit - len(self._sequence)

    def _propose(self) -> asyncio.Task[DraftChunk]:
        """Begin a round: ask for K tokens, or as many as are of use."""
        self._round_id += 1
        self._started_ns = time.perf_counter_ns()
        return asyncio.create_task(
            self._drafting.propose(self._sequence, self._draft_limit(), self._round_id)
        )

    def _draft_limit(self) -> int:
        """K of the next round: no more than fits the context, none after the output's end.

        An exact round near the end of the output drafts no more than can still be sent. Another
        does not stop short: its verdict may depend on the drafts that follow, and the text should
        not depend on `max_tokens`. With windows across rounds it does all the same: one that is
        open at the end of the output has failed.
        """
        plan = self._plan
        if self._remaining <= 0:
            return 0
        limit = min(plan.num_speculative_tokens, plan.context_length - len(self._sequence))
        if RULE_PRESETS[plan.rule.name].token_exact:
            limit = min(limit, self._remaining - 1)
        return limit

    def _request(self, proposal: DraftChunk) -> VerifyRound:
        """The request to check a proposal, or to decode without one."""
        plan, window = self._plan, self._state.window
        plain = 1
        if plan.num_speculative_tokens == 0:
            plain = max(1, min(plan.max_plain_tokens, self._remaining))
        exact = plan.exact_until_position if self._exact_from is None else plan.context_length
        return VerifyRound(
            round_id=self._round_id,
            keep_length=0,
            append_token_ids=(),
            draft_token_ids=proposal.token_ids,
            max_plain_tokens=plain,
            budget=self._ledger.budget(window),
            exact_until_position=exact,
            open_window=window,
        )

    def _advance(
        self, event: Event, proposal: DraftChunk, request: VerifyRound | None = None
    ) -> RoundOutcome:
        """Do what follows from an event, and say so."""
        start = len(self._sequence)
        verdict = event.verdict if isinstance(event, Checked) else None
        if verdict is not None:
            self._drafting.accept(verdict.keep_length)
        self._state, commands = step(self._state, event)
        for command in commands:
            self._carry_out(command)
        now = time.perf_counter_ns()
        began_ns, self._started_ns = self._started_ns, now
        round_ns = now - began_ns
        self._recoveries.output_token_index = len(self._sequence) - self._prompt_length
        if verdict is not None and verdict.decisions:
            emitted = len(self._sequence) - start
            self._drafting.record(
                proposal.drafter, len(proposal.token_ids), verdict.num_accepted, emitted, round_ns
            )
        return RoundOutcome(
            commands=commands,
            verdict=verdict,
            start=start,
            committed_length=self._state.committed_length,
            round_ns=round_ns,
            request=request,
            proposal=proposal,
            round_id=self._round_id,
            began_ns=began_ns,
        )

    def _carry_out(self, command: Command) -> None:
        """The part of a command that concerns the sequence; the caller does what concerns text."""
        if isinstance(command, Extend):
            self._sequence.extend(command.token_ids)
        elif isinstance(command, RollBack):
            self._sequence.keep(command.length)
            self._drafting.accept(command.length)
            self._verifying.keep(command.length)
            self._sequence.extend([command.token_id])
            if self._exact_from is not None:
                self._exact_from = min(self._exact_from, command.length - self._prompt_length)

    def _watch(self, commands: Sequence[Command]) -> None:
        """Judge exactly from here on once the final tokens go in circles.

        A window that is open runs its course.
        """
        guard = self._loop_guard
        if guard is None or self._exact_from is not None:
            return
        for command in commands:
            if isinstance(command, Commit):
                for token in command.tokens:
                    guard.push(token.token_id)
        if guard.token_index is not None:
            self._exact_from = len(self._sequence) - self._prompt_length
