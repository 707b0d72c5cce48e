"""The engine loop: one thread owns the target, everything else queues rounds for it.

Continuous batching: every `step` takes what is ready, rounds of any length and chunks of prompts up
to a token budget, runs it as one forward, and answers each round that is complete. Handlers live on
the event loop and meet the engine only in `open`, `submit` and `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flyspec.engine.runner import ModelRunner
from flyspec.engine.scheduler import Budget, Pieces, Step, allot
from flyspec.errors import ResourceExhaustedError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.values.admin import ModelInfo, SessionStatus, TokenizerBundle
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound, VerifyTimings
from flyspec.values.tokens import TokenDistribution
from verify_service.sessions import Session, check_open
from verify_service.verdicts import Referee

log = logging.getLogger(__name__)

Answer = Verdict | Exception


@dataclass(slots=True, eq=False)
class PendingRound:
    """A round on its way through the engine; `remaining` counts undrafted tokens to decode.

    `pieces` is what the model still has to run for the next verdict, `started_ns` when it began to.
    """

    session: Session
    round: VerifyRound
    distributions: Sequence[TokenDistribution]
    deliver: Callable[[Answer], None]
    arrived_ns: int
    remaining: int
    pieces: Pieces | None = None
    started_ns: int = 0


class VerifyEngine:
    """Owns the target model and its slots; `prepare` runs first, in the engine's thread.

    `on_step` is told of every step there: its time in ns, its sessions, its tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TokenizerBundle,
        max_queue: int,
        prepare: Callable[[], None] = lambda: None,
        budget: Budget | None = None,
        on_step: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        self._prepare, self._on_step = prepare, on_step
        self._runner = runner
        self._referee = Referee(tokenizer.eos_token_ids, tokenizer.control_token_ids)
        self._budget = budget or Budget()
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue[PendingRound | Session | None] = queue.SimpleQueue()
        self._ready: list[PendingRound] = []
        self._active = self._opened_total = 0
        self._thread = threading.Thread(target=self._run, name="verify-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it after the step at hand; rounds not answered yet fail with `UnavailableError`."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def info(self) -> ModelInfo:
        """The target model."""
        return self._runner.info

    @property
    def sessions(self) -> SessionStatus:
        """Sessions open now and their limit; tokens looked for in the cache and found."""
        cache = self._runner.cache
        return SessionStatus(
            self._active, cache.num_slots, self._opened_total, cache.queries, cache.hits
        )

    @property
    def waiting(self) -> int:
        """Rounds that wait for the model, or for the rest of their steps."""
        return self._inbox.qsize() + len(self._ready)

    # --- called on the event loop -----------------------------------------------------------

    def open(self, open_: VerifyOpen) -> Session:
        """A session. Raises for bad values, or `ResourceExhaustedError` when none is free."""
        check_open(open_, self.info)
        limit = self._runner.cache.num_slots
        if self._active >= limit:
            raise ResourceExhaustedError(
                f"all {limit} sessions are in use; retry later or raise --max-sessions"
            )
        self._active += 1
        self._opened_total += 1
        return Session(
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
        session: Session,
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

        plain = 0 if round_.draft_token_ids else round_.max_plain_tokens
        self._inbox.put(
            PendingRound(
                session, round_, distributions, deliver, time.perf_counter_ns(), remaining=plain
            )
        )
        return answers

    def close(self, session: Session) -> None:
        """Give the session up; its slot is free before the next session's first round."""
        session.closed = True
        self._active -= 1
        self._inbox.put(session)

    # --- the engine thread ------------------------------------------------------------------

    def _run(self) -> None:
        self._prepare()
        while self._gather():
            self.step()
        for pending in self._ready:
            pending.deliver(UnavailableError("the verify service is shutting down"))

    def _gather(self) -> bool:
        """Take in what has arrived, waiting when there is nothing to do; False to stop."""
        while True:
            try:
                item = self._inbox.get(block=not self._ready)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Session):
                self._ready = [p for p in self._ready if p.session is not item]
                if item.slot is not None:
                    self._runner.cache.release(item.slot)
            elif not item.session.closed and self._begin(item):
                self._ready.append(item)

    def step(self) -> None:
        """Run what fits of what is ready, and answer what is complete."""
        work = [pending.pieces for pending in self._ready]
        counts = allot([pieces for pieces in work if pieces], self._budget)
        chosen = [(p, n) for p, n in zip(self._ready, counts, strict=True) if n]
        self._ready = [p for p, n in zip(self._ready, counts, strict=True) if not n]
        started = time.perf_counter_ns()
        steps = []
        for pending, count in chosen:
            assert pending.pieces is not None
            pending.started_ns = pending.started_ns or started
            steps.append(pending.pieces.take(count))
        logits = self._forward(steps)
        elapsed_ns = time.perf_counter_ns() - started
        self._on_step(elapsed_ns, len(chosen), sum(count for _, count in chosen))
        for (pending, _), rows in zip(chosen, logits, strict=True):
            if isinstance(rows, Exception):
                pending.deliver(rows)
            elif pending.pieces is None or pending.pieces.remaining:
                self._ready.append(pending)
            else:
                self._answer(pending, rows)
        self._ready.sort(key=lambda pending: pending.arrived_ns)

    def _forward(self, steps: list[Step]) -> Sequence[Tensor | Exception]:
        """Rows of each step; where the batch fails, each step gets a try of its own."""
        try:
            logits = self._runner.forward(steps)
            self._runner.synchronize()
            return logits
        except Exception as error:
            log.exception("a step of %d sequences failed", len(steps))
            if len(steps) == 1:
                return [error]
        return [rows for step in steps for rows in self._forward([step])]

    def _answer(self, pending: PendingRound, rows: Tensor) -> None:
        """Judge a round on its logits, apply the verdict and deliver it; or the error it meets."""
        session, round_ = pending.session, pending.round
        judging = time.perf_counter_ns()
        try:
            verdict = self._referee.decide(session, round_, pending.distributions, rows)
            session.apply(verdict, round_.draft_token_ids)
        except Exception as error:
            pending.deliver(error)
            return
        pending.remaining -= 1
        # A window fails once: what it failed in does not go on as plain decoding.
        ended = verdict.failed or verdict.next_token_id in self._referee.eos
        last = ended or pending.remaining <= 0
        now = time.perf_counter_ns()
        timings = VerifyTimings(
            queue_ns=pending.started_ns - pending.arrived_ns,
            forward_ns=judging - pending.started_ns,
            judge_ns=now - judging,
            service_ns=now - pending.arrived_ns,
        )
        pending.deliver(replace(verdict, round_id=round_.round_id, last=last, timings=timings))
        if not last:
            pending.arrived_ns, pending.started_ns = now, 0
            pending.pieces = Pieces(session.step(()))
            self._ready.append(pending)

    def _begin(self, pending: PendingRound) -> bool:
        """Set the session to what the round builds on; a round that cannot is answered so."""
        session, round_ = pending.session, pending.round
        try:
            session.begin(round_)
            if session.slot is None:
                lease = self._runner.cache.acquire(session.sequence.tokens)
                session.slot, session.cached = lease
            pending.pieces = Pieces(session.step(round_.draft_token_ids))
        except Exception as error:
            pending.deliver(error)
            return False
        room = self.info.context_length - len(session.sequence) + 1
        pending.remaining = min(pending.remaining, room)
        return True
