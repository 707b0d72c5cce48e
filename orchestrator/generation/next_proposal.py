"""Obtains the proposal for the next round: requests, waits, drafts ahead, follows decoding."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

from flyspec.drafter_names import PREDICTION
from flyspec.prefix import TokenSequence
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk, HeadRequest, Verdict
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.following import Follower
from orchestrator.generation.ledger import NOTHING, Ledger
from orchestrator.generation.pace import Pace
from orchestrator.generation.proposals import PredictedDrafts
from orchestrator.generation.recent import Recent
from orchestrator.generation.staging import Begun

AHEAD = 0.5
"""Minimum share of recent rounds in which drafting ahead was, or would have been, useful."""
AHEAD_MEMORY = 0.7


class NextProposal:
    """One generation's next proposal, to follow `sequence` as of the request.

    `limit` returns how many drafts are useful in a round of this `turn`, if the sequence is longer
    by the given number of tokens. Every request to the drafter has its own, increasing `round_id`;
    `began_ns` is when the round began, `drafted_ns` when the last proposal arrived or the wait for
    it ended, which may have been before. If K `adapts`, a round may have fewer drafts than are
    useful. What the `prediction` proposes, up to `most` tokens, goes before any drafter. With
    drafts, the drafter is asked for `num_ahead` proposals ahead. If it `may_be_tree`, a proposal
    has as many drafts in a tree.

    If the drafts are drawn (`GenerationPlan.draws`), none is dropped for being late, since how long
    a proposal takes depends on what is drawn, and one made during plain decoding says only what
    would have been drafted: it is heard of when the sequence has passed it.
    """

    def __init__(
        self,
        pace: Pace,
        drafting: Drafting,
        sequence: TokenSequence,
        limit: Callable[[int, int], int],
        ledger: Ledger,
        adapts: bool = False,
        prediction: PredictedDrafts | None = None,
        num_ahead: Callable[[], int] = lambda: 0,
        may_be_tree: Callable[[], bool] = lambda: False,
        draws: bool = False,
    ) -> None:
        self._pace, self._drafting, self._ledger = pace, drafting, ledger
        self._num_ahead, self._last_id = num_ahead, 0
        self._sequence, self._limit, self._adapts = sequence, limit, adapts
        self._may_be_tree, self._draws = may_be_tree, draws
        self.turn = pace.turn()
        self.round_id = self.began_ns = self.drafted_ns = 0
        self._asked: asyncio.Task[DraftChunk] | None = None
        self._follower: Follower | None = None
        self._prompt_length = self._followed_length = len(sequence)
        self._rest: DraftChunk | None = None  # of the follower's proposal
        self._wanted = 0  # drafts last requested, less those overtaken
        self._ahead: DraftAdvance | None = None  # requested while the last proposal was verified
        self._if_whole = 0  # the sequence's length if all of the last proposal is accepted
        self._useful = Recent(1.0, AHEAD_MEMORY, prior=1.0)
        self._prediction = prediction
        self.head_query = 0
        """Drafts that the next plain token is to bring from a head, to learn how good they are."""

    @property
    def is_there(self) -> bool:
        """Whether a proposal is ready, from following plain decoding or from the prediction."""
        return self._rest is not None

    @property
    def _is_following(self) -> bool:
        return self._follower is not None

    @property
    def is_wanted(self) -> bool:
        """Whether the next round has drafts, or should, so that plain decoding should end."""
        if self.is_there or self.head_query:
            return True
        return self._follower is None and self._useful_drafts(0) > 0

    def new_round_id(self) -> int:
        """Return an id for a message of a round, above all earlier ones."""
        self._last_id += 1
        return self._last_id

    def reserve(self, round_id: int) -> None:
        """Leave ids up to this one to rounds that the target begins by itself."""
        self._last_id = max(self._last_id, round_id)

    def goes_on(self) -> None:
        """Ask for nothing: the target has begun the next round, with drafts of its own."""
        self.turn = self._pace.turn()
        self._asked, self._if_whole, self.head_query = None, 0, 0

    def begin(self, begun: Begun | None = None) -> bool:
        """Begin a round, requesting as many drafts as are useful; return whether there are any.

        If the target has `begun` it already, only tells the drafter.
        """
        self.turn = self._pace.turn()
        if begun is not None:
            self._if_whole, self.began_ns = 0, time.perf_counter_ns()
            self._asked = asyncio.create_task(self._confirm(begun))
            return True
        if self._follower is None and self._predicts():
            self._if_whole, self._asked = 0, None
            return True  # `proposal` begins the round
        self.round_id = self.new_round_id()
        self.began_ns = time.perf_counter_ns()
        limit = 0 if self._follower else self._useful_drafts(0)
        if self._ahead is None and self._if_whole:
            self._useful.observe(len(self._sequence) == self._if_whole)
        elif self._ahead and self._adapts and not self._pace.repeats:
            limit = min(limit, self._ahead.max_tokens - 1)
        self._if_whole = 0
        self._asked = self._ask(limit, self.turn.min_confidence) if limit > 0 else None
        return limit > 0

    async def draft_ahead(self, proposal: DraftChunk) -> None:
        """While a proposal is verified, draft what follows if all of it is accepted.

        The drafts begin with the bonus token, which the drafter usually predicts correctly. Since
        it costs the drafter time, this is only done if it was useful in most recent rounds.
        """
        if proposal.drafter == PREDICTION or proposal.parents:
            return
        num_drafts, length = len(proposal.token_ids), len(self._sequence)
        self._if_whole = length + num_drafts + 1
        if self._ahead or self._useful.value < AHEAD or not self._drafting.repeats(proposal):
            return
        limit = self._useful_drafts(num_drafts + 1)
        if limit <= 0 or num_drafts < self._wanted:  # the drafter stopped early
            return
        self._ahead = DraftAdvance(
            self.new_round_id(), 0, (), limit + 1, min_confidence=self.turn.min_confidence
        )
        await self._drafting.propose_ahead(length + num_drafts, self._ahead)

    async def arrives(self, within_s: float) -> bool:
        """Wait up to `within_s` for the request; return whether none is pending."""
        if self._asked is None:
            return True
        await asyncio.wait((self._asked,), timeout=within_s)
        return self._asked.done()

    async def proposal(self, window_is_open: bool) -> DraftChunk | None:
        """Return the drafts of the current round; None to decode without drafts.

        If the drafter takes too long, decoding goes on without drafts and the drafter follows.
        """
        ahead, self._ahead = self._ahead, None
        follower = self._follower
        if (
            self._rest is None
            and follower
            and follower.length == self._prompt_length
            and self._useful_drafts(0)
        ):
            await self._catch_up(follower)
        rest, self._rest = self._rest, None
        if rest is not None:
            self.round_id = self.new_round_id()
            self.began_ns = time.perf_counter_ns()
            return rest
        asked = self._asked
        if asked is None:
            return NOTHING if window_is_open else None
        if not window_is_open and not await self._in_time(asked):
            self._follower = Follower(asked, len(self._sequence), self.began_ns)
            self._asked = None
            return None
        proposal = await asked
        self.drafted_ns = proposal.arrived_ns
        if ahead is not None:
            self._useful.observe(proposal.ahead)
        if proposal.ahead:
            self.round_id = proposal.round_id  # this round's own ID was not used
        if not proposal.token_ids and not self._drafting.reads_verdicts:
            self._pace.nothing_drafted()
        if not proposal.parents and math.prod(proposal.confidences) < self.turn.min_confidence:
            self._ledger.metrics.num_drafter_stops += 1
        return proposal

    async def _catch_up(self, behind_prompt: Follower) -> None:
        """Wait for the proposal requested after the prompt; if the output differs, ask again."""
        await self._in_time(behind_prompt.task)
        self._follower = behind_prompt._replace(at_least=0)
        self.follow()
        if not (self._is_following or self.is_there):
            self.begin()

    async def _in_time(self, asked: asyncio.Future[DraftChunk]) -> bool:
        """Wait for a proposal up to this turn's patience; return whether it arrived."""
        patience_ns = None if self._draws else self.turn.patience_ns
        if not asked.done():
            timeout_s = None if patience_ns is None else patience_ns / 1e9
            await asyncio.wait((asked,), timeout=timeout_s)
            self.drafted_ns = time.perf_counter_ns()
        return asked.done()

    def follow(self) -> None:
        """Query the drafter during plain decoding, and adopt its proposal if it is still valid.

        The prediction is asked first.
        """
        if self._predicts() or self.head_query:
            return
        if self._follower is None:
            if k := self._pace.follows(len(self._sequence) - self._followed_length):
                self._drafting.look_around()
                if self._drafting.reads_verdicts:
                    self.head_query, self._followed_length = k, len(self._sequence)
                    return
                self.round_id = self.new_round_id()
                asked = self._ask(k, score=True)
                self._follower = Follower(
                    asked, len(self._sequence), time.perf_counter_ns(), k if self._draws else 0
                )
        elif overtaken := self._follower.arrived(self._sequence.tokens, time.perf_counter_ns()):
            self._follower = None
            self._ledger.followed(overtaken.proposal)
            self._pace.followed(overtaken.passed if self._draws else overtaken)
            self.turn = self._pace.turn()
            if self._drafting.repeats(overtaken.proposal):
                limit = self._useful_drafts(0)
                self._wanted = min(self._wanted - overtaken.num_behind, limit)
                self._rest = overtaken.rest(limit)

    def head_request(self, most: int) -> HeadRequest | None:
        """Return the request for the proposal that comes with the next verdict, if any.

        `most` drafts are asked for where this turn's number says nothing of the next one's.
        """
        turn = self.turn
        if self._pace.repeats or turn.max_plain_tokens == 1:
            wanted = most
        else:
            wanted = self.head_query or turn.num_drafts
        return self._drafting.head_request(self._limit(1, wanted), turn.min_confidence)

    def heard(self, request: HeadRequest | None, verdict: Verdict) -> None:
        """Take a head's proposal from a verdict that the sequence has just been extended by.

        If it was only asked how good it is, what the target decodes next will tell.
        """
        self._drafting.received(request, verdict)
        if request is None or not verdict.last or not self.head_query:
            return
        self.head_query = 0
        if self._pace.turn().num_drafts:
            return  # `begin` takes it
        tokens = self._sequence.tokens
        if (block := self._drafting.take_block(tokens, request.max_tokens)) and block.token_ids:
            task: asyncio.Future[DraftChunk] = asyncio.get_running_loop().create_future()
            task.set_result(block)
            self._follower = Follower(
                task, len(tokens), time.perf_counter_ns(), len(block.token_ids)
            )

    def _useful_drafts(self, num_more: int) -> int:
        """Return how many of this turn's drafts are useful behind `num_more` more tokens."""
        return self._limit(num_more, self.turn.num_drafts)

    def _predicts(self) -> bool:
        """Take the next proposal from the prediction, if it has one; return whether it has."""
        if self._prediction is None:
            return False
        most = self._prediction.most
        if self._pace.repeats:
            most = self.turn.num_drafts
        output = self._sequence.tokens[self._prompt_length :]
        proposal = self._prediction.propose(output, self._limit(0, most) if most else 0)
        if proposal is not None:
            self._rest, self._wanted = proposal, len(proposal.token_ids)
        return proposal is not None

    def close(self) -> None:
        for task in (self._asked, self._follower and self._follower.task):
            if task is not None:
                task.cancel()

    def _ask(
        self, num_drafts: int, min_confidence: float = 0.0, score: bool = False
    ) -> asyncio.Task[DraftChunk]:
        self._followed_length, self._wanted = len(self._sequence), num_drafts
        request = DraftAdvance(
            self.round_id, 0, (), num_drafts, min_confidence=min_confidence, score=score,
            ahead=None if score else self._wants_ahead(num_drafts),
            max_tree_tokens=num_drafts if not score and self._may_be_tree() else 0,
        )  # fmt: skip
        tokens = self._sequence.tokens.copy()
        return asyncio.create_task(self._drafting.propose(tokens, request, self._pace.repeats))

    async def _confirm(self, begun: Begun) -> DraftChunk:
        """Tell the drafter which of its proposals is being verified; return that."""
        proposal = replace(begun.proposal, round_id=begun.round_id)
        self._followed_length, self._wanted = len(self._sequence), len(proposal.token_ids)
        ahead = self._wants_ahead(self.turn.num_drafts or self._wanted)
        request = DraftAdvance(self.new_round_id(), 0, (), 0, ahead=ahead)
        tokens = self._sequence.tokens.copy()
        return await self._drafting.confirm(tokens, proposal, request)

    def _wants_ahead(self, num_drafts: int) -> DraftAhead | None:
        count = self._num_ahead()
        return DraftAhead(count, num_drafts) if count else None
