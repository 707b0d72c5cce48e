"""The verify engine: the target's sessions, and rounds as sequential code.

Handlers on the event loop only open and close sessions, and submit and interrupt rounds. Everything
that touches the model runs in the engine's thread, batched with other rounds and prompt chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import NamedTuple

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.loop import OnStep, Ran, StepLoop, Work
from flyspec.engine.model import Draw, Model, Rows, Step
from flyspec.engine.scheduler import StepBudget
from flyspec.engine.stopwatch import Stopwatch
from flyspec.errors import ResourceExhaustedError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.self_drafting import following_round
from flyspec.step_costs import StepCosts
from flyspec.values.admin import JudgeInfo, ModelInfo, TokenizerBundle
from flyspec.values.rounds import (
    HeadProposal,
    SessionStatus,
    Verdict,
    VerifyOpen,
    VerifyRound,
    VerifyTimings,
)
from flyspec.values.tokens import Drafted, TokenDistribution
from verify_service.adaptive_verification import admit
from verify_service.heads import Heads
from verify_service.sessions import TargetSession, check_open
from verify_service.slot_queue import SessionPlace, SlotQueue
from verify_service.trees import check_tree
from verify_service.verdicts import RoundContext, RoundJudge

Answer = Verdict | Exception
FIRST_STREAMED_NS, STREAMED_NS = 2_500_000, 10_000_000
"""Nanoseconds between messages of plainly decoded tokens: the first interval, doubled with each
message up to the second. A longer step takes precedence."""


class PendingRound(NamedTuple):
    """A round, when it arrived or began (`perf_counter_ns`), and its drafts if a head went on.

    `distributions` has one per draft or none; `drafting_ns` is the time that a head's drafts took.
    """

    round_: VerifyRound
    since_ns: int
    distributions: Sequence[TokenDistribution] = ()
    drafts: HeadProposal | None = None
    drafting_ns: int = 0

    def following(self, verdict: Verdict, drafting_ns: int) -> PendingRound:
        """Return the round that the head goes on with, given the verdict with its proposal.

        Raises `UnavailableError` if the head failed and an open window needs drafts.
        """
        drafts = verdict.proposal or HeadProposal()
        following = following_round(self.round_, verdict, drafts.token_ids)
        if not drafts.token_ids and following.open_window:
            raise UnavailableError("a head failed, and the open window needs drafts")
        return PendingRound(following, perf_counter_ns(), drafts.distributions, drafts, drafting_ns)


class VerdictSender:
    """Delivers a round's verdicts."""

    def __init__(self, round_: PendingRound, deliver: Callable[[Verdict], None]) -> None:
        self._round, self._deliver = round_, deliver
        self._since_ns = round_.since_ns

    def send(
        self, verdict: Verdict, began_ns: int, judging_ns: int, head_ns: int = 0, last: bool = True
    ) -> None:
        """Deliver a verdict; its step and judging began then, and heads took `head_ns` since."""
        now_ns, round_ = perf_counter_ns(), self._round
        timings = VerifyTimings(
            queue_ns=began_ns - self._since_ns,
            forward_ns=judging_ns - began_ns,
            judge_ns=now_ns - judging_ns - head_ns,
            service_ns=now_ns - self._since_ns,
            head_ns=head_ns + round_.drafting_ns,
        )
        round_id, drafts = round_.round_.round_id, round_.drafts
        self._deliver(
            replace(verdict, round_id=round_id, last=last, timings=timings, drafts=drafts)
        )
        self._since_ns = now_ns

    def send_and_go_on(self, verdict: Verdict, began_ns: int, judging_ns: int) -> None:
        """Deliver the verdict after which the head goes on with the next round."""
        following = self._round.round_.round_id + 1
        self.send(replace(verdict, started_staged_round_id=following), began_ns, judging_ns)


class Judged(NamedTuple):
    """A round's verdict, or what prevents it; when judging began (`perf_counter_ns`).

    `head_ns` is the time that heads took for all rounds of the step. If its head goes on by itself,
    the verdict was `sent` already.
    """

    verdict: Verdict | Exception
    judging_ns: int
    head_ns: int = 0
    sent: bool = False


class VerifyEngine(StepLoop[Rows | Drafted | Judged]):
    """Owns the target model and its slots.

    `costs` are its step times, empty until measured.
    """

    service = "verify"

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerBundle,
        max_queue: int,
        prepare: Callable[[], None] = lambda: None,
        budget: StepBudget | None = None,
        on_step: OnStep = lambda *_: None,
        max_waiting: int | None = None,
        step_timeout_s: float = math.inf,
        autojudge: AutoJudge | None = None,
        heads: Heads | None = None,
    ) -> None:
        super().__init__(model, prepare, budget, on_step, step_timeout_s)
        self._judge = RoundJudge(tokenizer.eos_token_ids, tokenizer.control_token_ids, autojudge)
        info = model.info
        self.heads = heads or Heads({}, info.vocab_size, info.context_length)
        self._max_queue = max_queue
        self.costs = StepCosts()
        self._step_ns = STREAMED_NS  # of the last plainly decoded token
        self._rounds_of: dict[int, RoundContext] = {}  # by slot, those that wait for their step
        self._began_ns: dict[int, int] = {}  # by slot, when the first piece of its step began
        self._slots = SlotQueue(
            model.cache.num_slots,
            max_waiting,
            free_blocks=lambda: model.cache.num_free_blocks,
        )
        self._opened_total = 0

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    @property
    def judge_info(self) -> JudgeInfo | None:
        """The judge of the rule `autojudge`; None: there is none, so it cannot be used."""
        judge = self._judge.autojudge
        return None if judge is None else judge.info

    @property
    def sessions(self) -> SessionStatus:
        """Open and waiting sessions, their limit, and the prefix cache's queries and hits."""
        return self.sessions_for("")

    def sessions_for(self, orchestrator_id: str) -> SessionStatus:
        """Return `sessions` with the counts of others that this orchestrator sees."""
        cache, slots = self.model.cache, self._slots
        return SessionStatus(
            active=slots.active,
            limit=cache.num_slots,
            opened_total=self._opened_total,
            prefix_cache_queries=cache.queries,
            prefix_cache_hits=cache.hits,
            waiting=slots.waiting,
            others=slots.others(orchestrator_id),
            others_waiting=slots.others_waiting(orchestrator_id),
        )

    # --- called on the event loop -----------------------------------------------------------

    def open(self, open_: VerifyOpen) -> TargetSession:
        """Open a session. Raises for bad values, or `ResourceExhaustedError` if none is free."""
        check_open(open_, self.info, self.judge_info)
        place = self._slots.take(open_.orchestrator_id, self._blocks_of(open_))
        return self._opened(open_, place)

    async def open_in_turn(self, open_: VerifyOpen) -> TargetSession:
        """Open a session, waiting for room if `waited_ms` is set."""
        if open_.waited_ms is None:
            return self.open(open_)
        check_open(open_, self.info, self.judge_info)
        place = await self._slots.wait(
            open_.waited_ms / 1e3, open_.orchestrator_id, self._blocks_of(open_)
        )
        return self._opened(open_, place)

    def _blocks_of(self, open_: VerifyOpen) -> int:
        return self.model.cache.blocks_to_open(len(open_.token_ids))

    def _opened(self, open_: VerifyOpen, place: SessionPlace) -> TargetSession:
        self._opened_total += 1
        return TargetSession(
            sequence=TokenSequence(open_.token_ids),
            prompt_length=open_.prompt_length,
            rules=open_.rules,
            sampling=open_.sampling,
            seed=open_.seed,
            info=self.info,
            place=place,
            logprobs=open_.logprobs,
            stop_token_ids=frozenset(open_.stop_token_ids),
        )

    def submit(
        self,
        session: TargetSession,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> asyncio.Queue[Answer]:
        """Queue a round and return the queue of its answers, the last one marked `last`.

        `distributions` are those of the drafts, one per draft or none.
        """
        if self.waiting >= self._max_queue:
            raise ResourceExhaustedError(
                f"{self._max_queue} rounds are waiting for the model; "
                "retry later or raise --max-queue"
            )
        session.interrupted = False
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(answer: Answer) -> None:
            # The event loop may already be closed during shutdown.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        arrived = PendingRound(round_, perf_counter_ns(), distributions)
        work = self._rounds(session, arrived, deliver)
        self.add(session, work, deliver)
        return answers

    def interrupt(self, session: TargetSession) -> None:
        """End the session's round after the current token if it is decoding plainly."""
        session.interrupted = True
        self.nudge()

    def close(self, session: TargetSession) -> None:
        """Close the session; its slot is free before the next session's first round."""
        self._slots.give_back(session.place)

        def release() -> None:
            if session.slot is not None:
                self.model.cache.release(session.slot)
                self._slots.look_again()

        self.drop(session, release)

    # --- the engine thread ------------------------------------------------------------------

    def run_batch(self, wants: Sequence[Draw]) -> Sequence[Rows | Drafted | Judged]:
        """Return each step's tokens if all decode plainly, else what one forward's rows say.

        The rounds of all slots are judged together, then heads read what they need of all steps.
        With several rounds, drafts not worth their share of the step have no row.
        """
        if all(_is_drawn(want) for want in wants):
            return self.model.draw(wants, self.arrival)
        began_ns, watch = perf_counter_ns(), Stopwatch(self.model.info.device or "cpu")
        steps = self._admitted([want.step for want in wants])
        for step in steps:
            self._began_ns.setdefault(step.slot, began_ns)
        rows = self.model.forward(steps)
        watch.mark()
        rounds = [self._rounds_of[step.slot] for step in steps]
        whole = [index for index, step in enumerate(steps) if step.num_logits]
        # The only wait for the device, so that the forward's time is known after it.
        verdicts = self._judge.judge_all([(rounds[i], rows[i]) for i in whole])
        judged = dict(zip(whole, verdicts, strict=True))
        sent = {i for i, v in judged.items() if self._send_early(rounds[i], v, watch)}
        proposals, head_ns = self.heads.follow(steps, rows, rounds, judged)
        found: list[Rows | Judged] = [*rows]
        for index, verdict in judged.items():
            if isinstance(verdict, Verdict) and index in proposals:
                verdict = replace(verdict, proposal=proposals[index])
            found[index] = Judged(verdict, watch.marked_ns, head_ns, index in sent)
        return found

    def _send_early(
        self, context: RoundContext, verdict: Verdict | Exception, watch: Stopwatch
    ) -> bool:
        """Deliver a verdict at once if its head goes on by itself; return whether it does."""
        if context.send is None or not self.heads.continues(context, verdict):
            return False
        assert isinstance(verdict, Verdict)
        assert context.session.slot is not None
        context.send(verdict, self._began_ns[context.session.slot], watch.marked_ns)
        return True

    def _admitted(self, steps: list[Step]) -> list[Step]:
        """Return the steps without trailing drafts that are not worth checking."""
        survivals = [self._rounds_of[step.slot].survivals for step in steps]
        if len(steps) == 1 or not any(survivals):
            return steps
        kept = admit(survivals, sum(len(step.token_ids) for step in steps), self.costs)
        return [
            step._replace(
                token_ids=step.token_ids[: len(step.token_ids) - cut],
                num_logits=step.num_logits - cut,
                num_hidden=None if step.num_hidden is None else step.num_hidden - cut,
            )
            for step, chances, count in zip(steps, survivals, kept, strict=True)
            for cut in (len(chances) - count if step.num_logits else 0,)
        ]

    def spoiled(self, slot: int) -> None:
        super().spoiled(slot)
        self.heads.forget(slot)

    def steps_of(self, want: Draw, result: Rows | Drafted | Judged) -> int:
        return max(1, len(result.token_ids)) if isinstance(result, Drafted) else 1

    def _rounds(
        self,
        session: TargetSession,
        pending: PendingRound | None,
        deliver: Callable[[Answer], None],
    ) -> Work[Rows | Drafted | Judged]:
        """Run a round, and those that its head goes on with."""
        while pending is not None:
            pending = yield from self._round(session, pending, deliver)

    def _round(
        self,
        session: TargetSession,
        pending: PendingRound,
        deliver: Callable[[Answer], None],
    ) -> Generator[Draw, Ran[Rows | Drafted | Judged], PendingRound | None]:
        """Judge the drafts; without any, decode up to `max_plain_tokens`, several per step.

        Returns the round that the head goes on with, if it does.
        """
        round_, distributions = pending.round_, pending.distributions
        check_tree(session, round_, self.model.tree_refusal)
        self.heads.check(round_.head)
        session.begin(round_)
        first = session.slot is None
        if session.slot is None:
            session.slot, session.cached = self.model.cache.acquire(session.sequence.tokens)
            self.heads.adopt(session)
        slot, drafts = session.slot, round_.draft_token_ids
        plainly = not (drafts or round_.open_window or round_.head) and session.draws_plainly
        room = self.info.context_length - len(session.sequence) + 1
        remaining = 1 if drafts else min(round_.max_plain_tokens, room)
        streamed_ns = FIRST_STREAMED_NS
        sender = VerdictSender(pending, deliver)
        while True:
            head = self.heads.wanted(session, round_.head)
            is_last = bool(drafts) or remaining <= 1 or session.interrupted
            context = RoundContext(
                session, round_, distributions, head, is_last, sender.send_and_go_on
            )
            layers = (*context.hidden_layers, *self.heads.layers(head))
            step = session.step(round_.draft_token_ids, layers, self.heads.reader(head))
            want = Draw(step._replace(parents=tuple(round_.draft_parents)))
            if plainly:
                steps = 1
                if not first:
                    steps = min(remaining, max(1, streamed_ns // max(1, self._step_ns)))
                    streamed_ns = min(STREAMED_NS, 2 * streamed_ns)
                want = want._replace(
                    sampling=session.sampling,
                    max_tokens=steps,
                    stop_token_ids=self._judge.ends(session),
                )
            self._rounds_of[slot] = context
            try:
                ran = yield want
            finally:
                del self._rounds_of[slot]
                self._began_ns.pop(slot, None)
            result, head_ns, sent = ran.result, 0, False
            if not session.place.has_run:
                session.place.has_run = True
                self._slots.look_again()
            if isinstance(result, Drafted):
                judging_ns = perf_counter_ns()
                verdict = _plain_verdict(len(session.sequence), result)
                self._step_ns = ran.model_ns // len(result.token_ids)
            else:
                assert isinstance(result, Judged), "the step is whole"
                judged, judging_ns, head_ns, sent = result
                if isinstance(judged, Exception):
                    raise judged
                verdict = judged
            if round_.draft_parents:
                drafts = self._keep_path(slot, round_, verdict)
            session.apply(verdict, drafts)
            if sent:
                return pending.following(verdict, head_ns)
            remaining -= 1 + len(verdict.plain_token_ids)
            # A round whose window failed does not continue as plain decoding.
            ended = verdict.failed or verdict.next_token_id in self._judge.ends(session)
            last = ended or remaining <= 0 or session.interrupted
            first = False
            sender.send(verdict, ran.began_ns, judging_ns, head_ns, last)
            if last:
                return None

    def _keep_path(self, slot: int, round_: VerifyRound, verdict: Verdict) -> Sequence[int]:
        """Keep what was accepted of a tree in the cache; return the drafts that were judged."""
        drafts = round_.along(verdict.path).draft_token_ids
        if not verdict.failed:
            count, start = verdict.num_accepted, verdict.start_length
            self.model.cache.keep_path(slot, start, verdict.path[:count], drafts[:count])
        return drafts


def _is_drawn(want: Draw) -> bool:
    """True if a step's tokens are drawn by the model itself, or it only fills the cache."""
    step = want.step
    return want.sampling is not None or not (step.num_logits or step.hidden_count)


def _plain_verdict(start: int, drawn: Drafted) -> Verdict:
    """Return the verdict for tokens that the target drew after `start` others."""
    *before, last = drawn.token_ids
    return Verdict(
        start + len(before),
        last,
        start_length=start,
        plain_token_ids=tuple(before),
    )
