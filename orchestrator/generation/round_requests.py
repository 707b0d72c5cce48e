"""Where a generation is, and the requests of the rounds that continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyspec.prefix import TokenSequence
from flyspec.values.rounds import Budget, DraftChunk, RuleSegment, StagedOn, VerifyRound
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.head_rounds import HeadRounds
from orchestrator.generation.ledger import NOTHING, Ledger
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.next_proposal import NextProposal
from orchestrator.generation.pace import Pace
from orchestrator.generation.phases import Phases
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import Command, Commit, WindowState


class RoundRequests:
    """One generation's `sequence` and window `state`, and the requests that follow from them.

    `head_rounds` are those that a head of the target goes on with by itself. `next` has to be set
    to what proposes, which asks this for its limits.
    """

    next: NextProposal

    def __init__(
        self,
        plan: GenerationPlan,
        pace: Pace,
        drafting: Drafting,
        verifying: Verifying,
        ledger: Ledger,
        phases: Phases | None,
    ) -> None:
        self._plan, self._pace, self._phases = plan, pace, phases
        self._drafting, self._verifying, self._ledger = drafting, verifying, ledger
        self.sequence = TokenSequence(plan.prompt_token_ids)
        self._prompt_length = length = len(plan.prompt_token_ids)
        self.state = WindowState(length, length + plan.max_tokens, plan.eager)
        self.head_rounds = HeadRounds(plan, not (phases or plan.prediction))
        self._loop_guard = LoopGuard() if plan.loop_guard else None
        self._exact_from: int | None = None

    @property
    def remaining(self) -> int:
        return self.state.limit - len(self.sequence)

    def draft_limit(self, num_more: int, wanted: int) -> int:
        """Return K for the next round, if the sequence has grown by `num_more` tokens by then.

        `wanted` is how many drafts there could be.

        K is limited to what fits the context, and is 0 after the end of the output.

        With a token-exact rule, rounds near the end of the output draft no more than can still be
        emitted. Other rules do not cut rounds short: a verdict may depend on the drafts that
        follow, and the output should not depend on `max_tokens`. With windows across rounds it
        still does: a window open at the end of the output fails.
        """
        plan, window = self._plan, self.state.window
        remaining, length = self.remaining - num_more, len(self.sequence) + num_more
        if window is not None and plan.adaptive and not self._pace.repeats:
            wanted = max(wanted, window.remaining_matches)
        if remaining <= 0:
            return 0
        limit = min(wanted, plan.context_length - length)
        exact = plan.token_exact
        if self._phases is not None and window is None:
            exact = self._phases.exact_from_here
        return min(limit, remaining - 1) if exact else limit

    def may_be_tree(self) -> bool:
        """Whether the next proposal may be a tree: one rule, of chains' verdicts, judges it."""
        plan = self._plan
        trees = plan.draft_trees and plan.distribution is None and self._phases is None
        return trees and self._verifying.takes_trees

    def request(self, proposal: DraftChunk) -> VerifyRound:
        """Return the request to verify a proposal, or to decode without one."""
        plan, window = self._plan, self.state.window
        plain = 1
        if proposal is NOTHING:
            most = self.next.turn.max_plain_tokens or plan.max_plain_tokens
            if self.next.head_query:
                most = 1
            plain = max(1, min(most, plan.max_plain_tokens, self.remaining))
        exact = plan.exact_until_position if self._exact_from is None else plan.context_length
        return VerifyRound(
            round_id=self.next.round_id,
            keep_length=0,
            append_token_ids=(),
            draft_token_ids=proposal.token_ids,
            max_plain_tokens=plain,
            budget=self._ledger.budget(window),
            exact_until_position=exact,
            open_window=window,
            draft_survivals=() if proposal.parents else self._pace.survivals(proposal),
            num_speculative_tokens=plan.judged_k,
            num_top_tokens=self._drafting.num_top_tokens(proposal),
            rule_segments=self._segments(proposal),
            head=self.next.head_request(plan.num_speculative_tokens),
            draft_parents=proposal.parents,
        )

    def _segments(self, proposal: DraftChunk) -> Sequence[RuleSegment]:
        """Return which rule judges which drafts of a proposal; none if there is only one."""
        if self._phases is None or not proposal.token_ids:
            return ()
        window = self.state.window
        return self._phases.segments(
            self.sequence.tokens,
            proposal.token_ids,
            lambda index: self._ledger.phase_budget(index, window),
        )

    def allowing(self, proposal: DraftChunk) -> VerifyRound:
        """Return `request`, with the rounds that a head may go on with after it."""
        request, length = self.request(proposal), len(self.sequence)
        alike = self._pace.lets_go_on and not self._drafting.relays
        if request.head is not None and alike:
            room = min(self.remaining, self._plan.context_length - length)
            request = self.head_rounds.allow(request, room)
        if request.head is not None:
            self.next.reserve(request.round_id + request.head.num_rounds)
        return request

    def staged_request(
        self, on: StagedOn, pushed: DraftChunk, behind: list[int]
    ) -> VerifyRound | None:
        """Return the round that verifies a proposal made ahead, `behind` more tokens than now.

        It is the one that would be sent then. None if there would be none, or maybe another one.
        """
        more = len(behind)
        limit = self.draft_limit(more, len(pushed.token_ids))
        if limit <= 0 or len(self.sequence) + more >= self.state.limit:
            return None
        if self._loop_guard is not None and self._exact_from is None:
            held = self.sequence.tokens[self.state.committed_length :]
            if self._loop_guard.would_trigger([*held, *behind]):
                return None
        return replace(
            self.request(pushed.cut(0, limit)),
            round_id=self.next.new_round_id(),
            keep_length=on.keep_length + 1,
            prefix_hash=self.sequence.hash_with(behind),
            budget=Budget(),
            open_window=None,
            staged_on=on,
        )

    def watch(self, commands: Sequence[Command]) -> None:
        """Require exact acceptance from here on once the final tokens loop.

        An open window runs its course.
        """
        guard = self._loop_guard
        if guard is None or self._exact_from is not None:
            return
        for command in commands:
            if isinstance(command, Commit):
                for token in command.tokens:
                    guard.push(token.token_id)
        if guard.token_index is not None:
            self._exact_from = len(self.sequence) - self._prompt_length

    def cut(self, length: int) -> None:
        """Record that the sequence was cut back to `length` tokens."""
        if self._exact_from is not None:
            self._exact_from = min(self._exact_from, length - self._prompt_length)

    def loop_guard_index(self, num_tokens: int) -> int | None:
        """Return the output index from which the loop guard forced exact acceptance.

        None if the first `num_tokens` output tokens did not trigger the guard.
        """
        guard = self._loop_guard
        if self._exact_from is None or guard is None or guard.token_index is None:
            return None
        if guard.token_index > num_tokens:
            return None
        return min(self._exact_from, num_tokens)
