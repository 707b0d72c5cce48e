"""The engine loop: one thread owns the target, everything else queues rounds for it.

`step` takes all rounds that are ready, runs their forwards, judges each and answers it. Handlers
live on the event loop and meet the engine only in `submit` and `close`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flyspec.engine.runner import ModelRunner
from flyspec.errors import InvalidArgumentError, ResourceExhaustedError
from flyspec.prefix import TokenSequence
from flyspec.types import (
    ModelInfo,
    RoundVerdict,
    SessionStatus,
    TokenizerBundle,
    Verdict,
    VerifyOpen,
    VerifyRound,
    VerifyTimings,
)
from flyspec.validation import validate_rule, validate_sampling
from verify_service.rules import judge
from verify_service.sessions import Session, check_token_ids

log = logging.getLogger(__name__)

Answer = RoundVerdict | Exception


@dataclass(slots=True, eq=False)
class PendingRound:
    """A round on its way through the engine; `remaining` counts undrafted tokens to decode."""

    session: Session
    round: VerifyRound
    deliver: Callable[[Answer], None]
    arrived_ns: int
    remaining: int
    begun: bool = False


class VerifyEngine:
    """Owns the target model and its slots; `prepare` runs first, in the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TokenizerBundle,
        max_queue: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare = prepare
        self._runner = runner
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._control = frozenset(tokenizer.control_token_ids)
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue[PendingRound | Session | None] = queue.SimpleQueue()
        self._ready: deque[PendingRound] = deque()
        self._opened_total = 0
        self._thread = threading.Thread(target=self._run, name="verify-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it after the step at hand."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def info(self) -> ModelInfo:
        """The target model."""
        return self._runner.info

    @property
    def sessions(self) -> SessionStatus:
        """Sessions open now and their limit."""
        cache = self._runner.cache
        return SessionStatus(cache.num_slots - cache.num_free, cache.num_slots, self._opened_total)

    # --- called on the event loop -----------------------------------------------------------

    def open(self, open_: VerifyOpen) -> Session:
        """A session with a slot. Raises for bad values, or `ResourceExhaustedError` when full."""
        info = self.info
        if not open_.token_ids:
            raise InvalidArgumentError("open.token_ids is empty; send at least one token")
        if len(open_.token_ids) > info.context_length:
            raise InvalidArgumentError(
                f"open.token_ids: {len(open_.token_ids)} tokens exceed the model's context of "
                f"{info.context_length}; shorten the prompt"
            )
        if not 1 <= open_.prompt_length <= len(open_.token_ids):
            raise InvalidArgumentError(
                f"open.prompt_length must be between 1 and {len(open_.token_ids)}, "
                f"got {open_.prompt_length}"
            )
        check_token_ids("open.token_ids", open_.token_ids, info)
        validate_rule(open_.rule)
        validate_sampling(open_.sampling)
        slot = self._runner.cache.acquire()
        self._opened_total += 1
        return Session(
            slot=slot,
            sequence=TokenSequence(open_.token_ids),
            prompt_length=open_.prompt_length,
            rule=open_.rule,
            sampling=open_.sampling,
            seed=open_.seed,
            info=info,
        )

    def submit(self, session: Session, round_: VerifyRound) -> asyncio.Queue[Answer]:
        """Queue a round; its answers arrive in the returned queue, the last one marked `last`."""
        if self._inbox.qsize() + len(self._ready) >= self._max_queue:
            raise ResourceExhaustedError(
                f"{self._max_queue} rounds are waiting for the model; retry later"
            )
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        plain = 0 if round_.draft_token_ids else round_.max_plain_tokens
        self._inbox.put(
            PendingRound(session, round_, deliver, time.perf_counter_ns(), remaining=plain)
        )
        return answers

    def close(self, session: Session) -> None:
        """Give the session up; its slot is free after the step at hand."""
        session.closed = True
        self._inbox.put(session)

    # --- the engine thread ------------------------------------------------------------------

    def _run(self) -> None:
        self._prepare()
        while self._gather():
            rounds, self._ready = list(self._ready), deque()
            try:
                self.step(rounds)
            except Exception as error:
                log.exception("step failed")
                for pending in rounds:
                    pending.deliver(error)

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
                self._ready = deque(p for p in self._ready if p.session is not item)
                self._runner.cache.release(item.slot)
            elif not item.session.closed:
                self._ready.append(item)

    def step(self, rounds: list[PendingRound]) -> None:
        """Run and judge these rounds; plain decoding goes back to the queue until it is done."""
        rounds = [pending for pending in rounds if self._begin(pending)]
        if not rounds:
            return
        started = time.perf_counter_ns()
        steps = [pending.session.step(pending.round.draft_token_ids) for pending in rounds]
        logits = self._runner.forward(steps)
        self._runner.synchronize()
        forwarded = time.perf_counter_ns()
        for pending, rows in zip(rounds, logits, strict=True):
            judging = time.perf_counter_ns()
            verdict = self._judge(pending, rows)
            keep_length = pending.session.apply(verdict, pending.round.draft_token_ids)
            pending.remaining -= 1
            last = pending.remaining <= 0 or verdict.next_token_id in self._eos
            now = time.perf_counter_ns()
            timings = VerifyTimings(
                queue_ns=started - pending.arrived_ns,
                forward_ns=forwarded - started,
                judge_ns=now - judging,
                service_ns=now - pending.arrived_ns,
            )
            pending.deliver(
                RoundVerdict(
                    round_id=pending.round.round_id,
                    keep_length=keep_length,
                    next_token_id=verdict.next_token_id,
                    committed_length=keep_length + 1,
                    decisions=verdict.decisions,
                    last=last,
                    timings=timings,
                )
            )
            if not last:
                pending.arrived_ns = now
                self._ready.append(pending)

    def _begin(self, pending: PendingRound) -> bool:
        """Set the session to what the round builds on; a round that cannot is answered so."""
        if pending.begun:
            return True
        try:
            pending.session.begin(pending.round)
        except Exception as error:
            pending.deliver(error)
            return False
        pending.begun = True
        room = self.info.context_length - len(pending.session.sequence) + 1
        pending.remaining = min(pending.remaining, room)
        return True

    def _judge(self, pending: PendingRound, rows: Tensor) -> Verdict:
        session = pending.session
        return judge(
            session.rule,
            pending.round.draft_token_ids,
            rows,
            sampling=session.sampling,
            seed=session.seed,
            start_position=len(session.sequence),
            eos_token_ids=self._eos,
            control_token_ids=self._control,
            budget=pending.round.budget,
            exact_until_position=pending.round.exact_until_position,
        )
