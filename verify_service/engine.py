"""The verify engine: sessions of the target, and a round as one thing after the other.

Handlers live on the event loop and meet it only in `open`, `submit` and `close`; what touches the
model runs in the loop's thread, batched with all other rounds and chunks of prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns

from flyspec.engine.loop import OnStep, StepLoop, Work
from flyspec.engine.model import Draw, Model, Rows
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ResourceExhaustedError
from flyspec.prefix import TokenSequence
from flyspec.values.admin import ModelInfo, SessionStatus, TokenizerBundle
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound, VerifyTimings
from flyspec.values.tokens import TokenDistribution
from verify_service.sessions import TargetSession, check_open
from verify_service.verdicts import RoundJudge

Answer = Verdict | Exception


class VerifyEngine(StepLoop[Rows]):
    """Owns the target model and its slots."""

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerBundle,
        max_queue: int,
        prepare: Callable[[], None] = lambda: None,
        budget: StepBudget | None = None,
        on_step: OnStep = lambda *_: None,
    ) -> None:
        super().__init__("verify", prepare, budget, on_step)
        self.model = model
        self._judge = RoundJudge(tokenizer.eos_token_ids, tokenizer.control_token_ids)
        self._max_queue = max_queue
        self._active = self._opened_total = 0

    @property
    def info(self) -> ModelInfo:
        """The target model."""
        return self.model.info

    @property
    def sessions(self) -> SessionStatus:
        """Sessions open now and their limit; tokens looked for in the cache and found."""
        cache = self.model.cache
        return SessionStatus(
            self._active, cache.num_slots, self._opened_total, cache.queries, cache.hits
        )

    # --- called on the event loop -----------------------------------------------------------

    def open(self, open_: VerifyOpen) -> TargetSession:
        """A session. Raises for bad values, or `ResourceExhaustedError` when none is free."""
        check_open(open_, self.info)
        limit = self.model.cache.num_slots
        if self._active >= limit:
            raise ResourceExhaustedError(
                f"all {limit} sessions are in use; retry later or raise --max-sessions"
            )
        self._active += 1
        self._opened_total += 1
        return TargetSession(
            sequence=TokenSequence(open_.token_ids),
            prompt_length=open_.prompt_length,
            rule=open_.rule,
            sampling=open_.sampling,
            seed=open_.seed,
            info=self.info,
            logprobs=open_.logprobs,
        )

    def submit(
        self,
        session: TargetSession,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution] = (),
    ) -> asyncio.Queue[Answer]:
        """Queue a round; its answers arrive in the returned queue, the last one marked `last`.

        `distributions` are those of the drafts, one each or none.
        """
        if self.waiting >= self._max_queue:
            raise ResourceExhaustedError(
                f"{self._max_queue} rounds are waiting for the model; "
                "retry later or raise --max-queue"
            )
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(answer: Answer) -> None:
            # The event loop may be gone while the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        work = self._round(session, round_, distributions, deliver, perf_counter_ns())
        self.add(session, work, deliver)
        return answers

    def close(self, session: TargetSession) -> None:
        """Give the session up; its slot is free before the next session's first round."""
        self._active -= 1

        def release() -> None:
            if session.slot is not None:
                self.model.cache.release(session.slot)

        self.drop(session, release)

    # --- the engine thread ------------------------------------------------------------------

    def run_batch(self, wants: Sequence[Draw]) -> Sequence[Rows]:
        """The rows of each step, of one forward."""
        found = self.model.forward([want.step for want in wants])
        self.model.synchronize()
        return found

    def _round(
        self,
        session: TargetSession,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
        deliver: Callable[[Answer], None],
        arrived_ns: int,
    ) -> Work[Rows]:
        """Judge the drafts; without any, decode token by token up to `max_plain_tokens`."""
        session.begin(round_)
        if session.slot is None:
            session.slot, session.cached = self.model.cache.acquire(session.sequence.tokens)
        drafts = round_.draft_token_ids
        room = self.info.context_length - len(session.sequence) + 1
        remaining = 1 if drafts else min(round_.max_plain_tokens, room)
        while True:
            ran = yield Draw(session.step(drafts))
            judging_ns = perf_counter_ns()
            verdict = self._judge.decide(session, round_, distributions, ran.result.logits)
            session.apply(verdict, drafts)
            remaining -= 1
            # A window fails once: what it failed in does not go on as plain decoding.
            ended = verdict.failed or verdict.next_token_id in self._judge.eos
            last = ended or remaining <= 0
            now_ns = perf_counter_ns()
            timings = VerifyTimings(
                queue_ns=ran.began_ns - arrived_ns,
                forward_ns=judging_ns - ran.began_ns,
                judge_ns=now_ns - judging_ns,
                service_ns=now_ns - arrived_ns,
            )
            deliver(replace(verdict, round_id=round_.round_id, last=last, timings=timings))
            if last:
                return
            arrived_ns = now_ns
