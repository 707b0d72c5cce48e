"""The thread that owns a model: it runs the next step of all pending work as one batch.

Work is a generator: it yields the draws to run and is sent their results. So a proposal or a round
is written sequentially, and knows nothing of threads, batches or the pieces that a long step is cut
into. Other threads only queue work. No torch.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from time import perf_counter_ns
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from flyspec.engine.cache_table import CacheTable, Claim
from flyspec.engine.failures import TICK_S, Call, Failures, StepWatch
from flyspec.engine.model import Draw, Interrupt, Model
from flyspec.engine.scheduler import Pieces, StepBudget, allot
from flyspec.errors import FlyspecError, ModelFailureError, ModelLostError, UnavailableError

log = logging.getLogger(__name__)


R = TypeVar("R")

_NUDGE = (object(), lambda: None)
LOST_JOIN_S = 0.5
"""Seconds to wait for the thread of a lost model, which may hang, to end."""


class Ran(NamedTuple, Generic[R]):
    """A draw's result, when its first piece began, and the time of the calls it was in, in ns."""

    result: R
    began_ns: int
    model_ns: int


Work: TypeAlias = Generator[Draw, Ran[R], None]
"""A draw may run for fewer steps than its `max_tokens`; the result shows how many."""
OnStep: TypeAlias = Callable[[int, int, int, int], None]
"""Called in the loop's thread with the time of each step in ns, its sessions, its tokens, and the
number of such steps. Steps of one call are assigned equal times."""


class _Task(Generic[R]):
    """Pending work for `owner`; `fail` is called with the error that ends it."""

    def __init__(self, owner: Hashable, work: Work[R], fail: Callable[[Exception], None]) -> None:
        self.owner, self.work, self.fail = owner, work, fail
        self.since_ns = perf_counter_ns()
        self.began_ns = self.model_ns = 0
        self.want: Draw
        self.pieces: Pieces

    def go_on(self, ran: Ran[R] | Exception | None = None) -> bool:
        """Send the result or error (None to begin); return whether there is more to run.

        Raises `FloatingPointError` if the work finds that the result is not finite.
        """
        try:
            if isinstance(ran, Exception):
                self.want = self.work.throw(ran)
            else:
                self.want = next(self.work) if ran is None else self.work.send(ran)
        except StopIteration:
            return False
        except Exception as error:
            if isinstance(error, FloatingPointError) and isinstance(ran, Ran):
                raise
            self.fail(error)
            return False
        self.pieces = Pieces(self.want.step)
        self.began_ns = self.model_ns = 0
        if ran is not None:
            self.since_ns = perf_counter_ns()
        return True

    def claim(self, cache: CacheTable) -> Claim:
        """Return what the rest of the step, and all its draws, need of the cache.

        What the step builds on may have been lost to older sequences: then it is run again first.
        """
        pieces, slot = self.pieces, self.want.step.slot
        if cache.length(slot) < pieces.start:
            pieces.put_before(cache.lost(slot, pieces.start))
        return Claim(slot, pieces.start, pieces.remaining + self.want.max_tokens - 1)


class StepLoop(ABC, Generic[R]):
    """Runs the work of many owners in order of arrival; after a draw, work goes to the end.

    `prepare` runs first, in the loop's thread.

    A call of the model that takes longer than `step_timeout_s`, plus `STEP_TOKEN_S` per token, is
    hung: the model is lost, and all work fails with `ModelLostError`.
    """

    service: ClassVar[str]
    """The service's name in errors."""

    def __init__(
        self,
        model: Model,
        prepare: Callable[[], None] = lambda: None,
        budget: StepBudget | None = None,
        on_step: OnStep = lambda *_: None,
        step_timeout_s: float = math.inf,
    ) -> None:
        self.model, self._prepare, self._on_step = model, prepare, on_step
        self._step_timeout_s = step_timeout_s
        self._budget = budget or StepBudget()
        self._inbox: queue.SimpleQueue[_Task[R] | tuple[Hashable, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.arrival = Interrupt()
        """Set when something has arrived: a call of several steps should end."""
        self._ready: list[_Task[R]] = []
        self._prepared: Future[None] = Future()
        self.failures = Failures(self.service)
        self._call: Call | None = None  # the current one, until its results are delivered
        self._chosen: Sequence[_Task[R]] = ()  # the tasks in it
        name = f"{self.service}-engine"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @abstractmethod
    def run_batch(self, wants: Sequence[Draw]) -> Sequence[R]:
        """Run all draws in one call of the model, and return the result of each."""

    def steps_of(self, want: Draw, result: R) -> int:
        return 1

    def spoiled(self, slot: int) -> None:
        """Handle a failed step of this slot: no other sequence may reuse its contents."""
        self.model.cache.forget(slot)

    @property
    def waiting(self) -> int:
        """Amount of work waiting for the model, or for the rest of its steps."""
        return self._inbox.qsize() + len(self._ready)

    @property
    def step_running_ns(self) -> int:
        """Nanoseconds that the current call has been running; 0 between calls."""
        call = self._call
        return perf_counter_ns() - call.began_ns if call else 0

    def start(self) -> Future[None]:
        """Start the thread; the future completes after `prepare`, with any error it raised."""
        self._thread.start()
        if self._step_timeout_s < math.inf:
            name = f"{self.service}-watch"
            threading.Thread(target=self._watch, name=name, daemon=True).start()
        return self._prepared

    def stop(self) -> None:
        """End the thread after the current call; pending work fails with `UnavailableError`."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(LOST_JOIN_S if self.failures.lost.done() else None)

    def add(self, owner: Hashable, work: Work[R], fail: Callable[[Exception], None]) -> None:
        """Queue work; its owner must have no other pending."""
        if self.failures.lost.done():
            fail(self._lost_error())
            return
        self._put(_Task(owner, work, fail))

    def nudge(self) -> None:
        """End a call of several steps after the current one, so that its work can react."""
        self._put(_NUDGE)

    def drop(self, owner: Hashable, release: Callable[[], None]) -> None:
        """End the owner's work before its next step, then call `release`."""
        self._put((owner, release))

    def _put(self, item: _Task[R] | tuple[Hashable, Callable[[], None]] | None) -> None:
        self._inbox.put(item)
        self.arrival.set()

    # --- the loop's thread ------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        lost = self.failures.lost
        while not lost.done() and self._gather():
            self.step()
        if lost.done():
            self._fail_all()
        for task in self._ready:
            task.fail(UnavailableError(f"the {self.service} service is shutting down"))

    def _gather(self) -> bool:
        """Take in what has arrived, waiting if there is nothing to do; return False to stop."""
        arrived: list[_Task[R]] = []
        while True:
            self.arrival.clear()  # anything put from here on sets it again
            try:
                item = self._inbox.get(block=not (self._ready or arrived))
            except queue.Empty:
                # Only now, so that work whose owner has already left never begins.
                self._ready += [task for task in arrived if task.go_on()]
                arrived = []
                if self._ready:
                    return True
                continue
            if item is None:
                self._ready += arrived
                return False
            if item is _NUDGE:
                continue
            if isinstance(item, _Task):
                arrived.append(item)
            else:
                self._close(*item, arrived)

    def _close(self, owner: Hashable, release: Callable[[], None], arrived: list[_Task[R]]) -> None:
        try:
            for tasks in (self._ready, arrived):
                for task in [task for task in tasks if task.owner is owner]:
                    tasks.remove(task)
                    task.work.close()
            release()
        except Exception:
            log.exception("could not close a session")

    def step(self) -> None:
        """Run as much ready work as fits, and deliver complete results."""
        if len(self._ready) > 1:
            self._ready.sort(key=lambda task: task.since_ns)
        # Memory goes by the age of sessions, and for their whole steps: a prompt that ran out of it
        # halfway would have been computed in vain.
        cache = self.model.cache
        has_room = cache.make_room([task.claim(cache) for task in self._ready])
        ready = [task for task, has in zip(self._ready, has_room, strict=True) if has]
        refused = [task for task, has in zip(self._ready, has_room, strict=True) if not has]
        counts = allot([task.pieces for task in ready], self._budget)
        self._ready = refused
        self._ready += [task for task, count in zip(ready, counts, strict=True) if not count]
        chosen = [(t, t.pieces.take(n)) for t, n in zip(ready, counts, strict=True) if n]
        # All run the same number of steps: work that wants fewer, or waits, is not held up.
        steps = min([1 if t.pieces.remaining else t.want.max_tokens for t in ready])
        wants = [task.want.part(piece, steps) for task, piece in chosen]
        self._chosen = [task for task, _ in chosen]
        began = perf_counter_ns()
        results = self._attempt(wants)
        elapsed = perf_counter_ns() - began
        if steps > 1:
            steps = max(map(self._steps, [task.want for task, _ in chosen], results))
        self._on_step(elapsed // steps, len(chosen), sum(counts), 1)
        if steps > 1:  # after the first one, a token each
            self._on_step(elapsed // steps, len(chosen), len(chosen), steps - 1)
        for (task, _), result in zip(chosen, results, strict=True):
            task.began_ns = task.began_ns or began
            task.model_ns += elapsed
            if isinstance(result, FlyspecError):
                going_on = task.go_on(result)
            elif isinstance(result, Exception):
                going_on = task.go_on(self._failed(task, result))
            elif task.pieces.remaining:
                going_on = True
            else:
                going_on = self._hand_over(task, Ran(result, task.began_ns, task.model_ns))
            if going_on:
                self._ready.append(task)
        self._call, self._chosen = None, ()

    def _hand_over(self, task: _Task[R], ran: Ran[R]) -> bool:
        """Deliver a result, which shows whether the step worked; return whether there is more."""
        try:
            going_on = task.go_on(ran)
        except FloatingPointError as error:
            task.fail(self._failed(task, error))
            return False
        self.failures.worked()
        return going_on

    def _failed(self, task: _Task[R], error: Exception) -> ModelFailureError:
        self.spoiled(task.want.step.slot)
        return self.failures.failed(error)

    def _steps(self, want: Draw, result: R | Exception) -> int:
        return 1 if isinstance(result, Exception) else self.steps_of(want, result)

    def _attempt(self, wants: Sequence[Draw]) -> Sequence[R | Exception]:
        """Return each draw's result; if the batch fails, each is tried on its own."""
        num_tokens = sum(len(want.step.token_ids) + want.max_tokens - 1 for want in wants)
        self._call = Call(perf_counter_ns(), num_tokens)
        try:
            return self.run_batch(wants)
        except Exception as error:
            if not isinstance(error, FlyspecError):
                log.exception("a step of %d sequences failed", len(wants))
            if len(wants) == 1:
                return [error]
        return [result for want in wants for result in self._attempt([want])]

    # --- a lost model -----------------------------------------------------------------------

    def _watch(self) -> None:
        """Check the current call periodically, in a separate thread."""
        watch, last, lost = StepWatch(self._step_timeout_s), time.monotonic(), self.failures.lost
        self._prepared.exception()  # loading may take any time
        while self._thread.is_alive() and not lost.done():
            self._thread.join(TICK_S)
            now = time.monotonic()
            if reason := watch.observe(now - last, self._call):
                self.failures.lose(reason)
                self._fail_all()
            last = now
        if self._call is not None and not lost.done():
            self.failures.lose("its thread ended in the middle of a step")
            self._fail_all()

    def _fail_all(self) -> None:
        """Fail all pending work, whether or not the loop's thread returns."""
        error = self._lost_error()
        waiting, self._ready = [*self._chosen, *self._ready], []
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Task):
                waiting.append(item)
        for task in waiting:
            task.fail(error)

    def _lost_error(self) -> ModelLostError:
        reason = self.failures.lost.result()
        return ModelLostError(f"the model of the {self.service} service is lost: {reason}")
