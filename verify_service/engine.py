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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flyspec.engine.distributions import decode
from flyspec.engine.runner import ModelRunner
from flyspec.engine.sampling import History, token_logprobs
from flyspec.errors import ResourceExhaustedError
from flyspec.prefix import TokenSequence
from flyspec.types import (
    ModelInfo,
    RoundVerdict,
    SessionStatus,
    TokenDistribution,
    TokenizerBundle,
    TokenLogprobs,
    Verdict,
    VerifyOpen,
    VerifyRound,
    VerifyTimings,
)
from verify_service.rules import judge
from verify_service.sessions import Session, check_open

log = logging.getLogger(__name__)

Answer = RoundVerdict | Exception


@dataclass(slots=True, eq=False)
class PendingRound:
    """A round on its way through the engine; `remaining` counts undrafted tokens to decode."""

    session: Session
    round: VerifyRound
    distributions: Sequence[TokenDistribution]
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
        check_open(open_, self.info)
        slot = self._runner.cache.acquire()
        self._opened_total += 1
        return Session(
            slot=slot,
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
            PendingRound(
                session, round_, distributions, deliver, time.perf_counter_ns(), remaining=plain
            )
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
            try:
                self._answer(pending, rows, started, forwarded)
            except Exception as error:
                pending.deliver(error)

    def _answer(self, pending: PendingRound, rows: Tensor, started: int, forwarded: int) -> None:
        """Judge a round on its logits, apply the verdict and deliver it."""
        session, round_ = pending.session, pending.round
        judging = time.perf_counter_ns()
        verdict = self._judge(pending, rows)
        logprobs: list[TokenLogprobs] = []
        if session.logprobs is not None:
            verdict, logprobs = _with_logprobs(verdict, round_, rows, session)
        session.apply(verdict, round_.draft_token_ids)
        pending.remaining -= 1
        # A window fails once: what it failed in does not go on as plain decoding.
        ended = verdict.failed_window is not None or verdict.next_token_id in self._eos
        last = ended or pending.remaining <= 0
        window = verdict.open_window
        now = time.perf_counter_ns()
        timings = VerifyTimings(
            queue_ns=started - pending.arrived_ns,
            forward_ns=forwarded - started,
            judge_ns=now - judging,
            service_ns=now - pending.arrived_ns,
        )
        pending.deliver(
            RoundVerdict(
                round_id=round_.round_id,
                keep_length=verdict.keep_length,
                next_token_id=verdict.next_token_id,
                committed_length=window.position if window else verdict.keep_length + 1,
                decisions=verdict.decisions,
                last=last,
                timings=timings,
                open_window=window,
                logprobs=logprobs,
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
        session, drafts = pending.session, pending.round.draft_token_ids
        distributions = None
        if pending.distributions:
            distributions = decode(
                pending.distributions,
                drafts,
                self.info.vocab_size,
                renormalise=session.rule.name == "rejection",
                device=rows.device,
            )
        return judge(
            session.rule,
            drafts,
            rows,
            sampling=session.sampling,
            seed=session.seed,
            start_position=len(session.sequence),
            eos_token_ids=self._eos,
            control_token_ids=self._control,
            budget=pending.round.budget,
            exact_until_position=pending.round.exact_until_position,
            open_window=pending.round.open_window,
            draft_distributions=distributions,
            history=History(session.sequence.tokens, session.prompt_length, self._eos),
        )


def _with_logprobs(
    verdict: Verdict, round_: VerifyRound, rows: Tensor, session: Session
) -> tuple[Verdict, list[TokenLogprobs]]:
    """Log-probabilities of what stands, and the open window with those of its target's token."""
    top = session.logprobs or 0
    start = len(session.sequence)
    if verdict.failed_window is not None:
        given = verdict.failed_window.target_logprobs
        assert given is not None, "checked in Session.begin"
        return verdict, [given]
    count = verdict.num_accepted
    tokens = [*round_.draft_token_ids[:count], verdict.next_token_id]
    logprobs = token_logprobs(rows[: count + 1], tokens, top)
    window = verdict.open_window
    if window is not None and window.position >= start:
        row = rows[window.position - start : window.position - start + 1]
        (own,) = token_logprobs(row, [window.target_token_id], top)
        verdict = replace(verdict, open_window=window._replace(target_logprobs=own))
    return verdict, logprobs
