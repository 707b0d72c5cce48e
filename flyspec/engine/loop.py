"""The thread that owns a model: the next step of all work under way, run as one batch.

Work is a generator: it yields what it wants run and is sent what came of it. So a proposal and a
round are written as one thing after the other, and know nothing of threads, batches or the pieces
that a long step is cut into. Everyone else only queues. No torch.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from flyspec.engine.failures import Failures
from flyspec.engine.model import Draw, Interrupt
from flyspec.engine.scheduler import Pieces, StepBudget, allot
from flyspec.errors import FlyspecError, UnavailableError

log = logging.getLogger(__name__)


R = TypeVar("R")

_NUDGE = (object(), lambda: None)


class Ran(NamedTuple, Generic[R]):
    """What came of a want, when its first piece began, and the time of the calls it was in, ns."""

    result: R
    began_ns: int
    model_ns: int


Work: TypeAlias = Generator[Draw, Ran[R], None]
"""A draw may get fewer steps than its `max_tokens`: the result tells."""
OnStep: TypeAlias = Callable[[int, int, int, int], None]
"""Told of steps, in the loop's thread: the time of each in ns, its sessions, its tokens, and how
many there were. Those of one call are of equal times."""


class _Task(Generic[R]):
    """Work under way for `owner`; `fail` is told of the error that ends it."""

    def __init__(self, owner: Hashable, work: Work[R], fail: Callable[[Exception], None]) -> None:
        self.owner, self.work, self.fail = owner, work, fail
        self.since_ns = perf_counter_ns()
        self.began_ns = self.model_ns = 0
        self.want: Draw
        self.pieces: Pieces

    def go_on(self, ran: Ran[R] | Exception | None = None) -> bool:
        """Hand over what ran, or the error; whether there is more to run. None begins."""
        try:
            if isinstance(ran, Exception):
                self.want = self.work.throw(ran)
            else:
                self.want = next(self.work) if ran is None else self.work.send(ran)
        except StopIteration:
            return False
        except Exception as error:
            self.fail(error)
            return False
        self.pieces = Pieces(self.want.step)
        self.began_ns = self.model_ns = 0
        if ran is not None:
            self.since_ns = perf_counter_ns()
        return True


class StepLoop(ABC, Generic[R]):
    """Runs the work of many owners, in the order in which it came; who has run goes to the end.

    `prepare` runs first, in the loop's thread. `service` is the name by which errors call it.
    """

    def __init__(
        self,
        service: str,
        prepare: Callable[[], None] = lambda: None,
        budget: StepBudget | None = None,
        on_step: OnStep = lambda *_: None,
    ) -> None:
        self._service, self._prepare, self._on_step = service, prepare, on_step
        self._budget = budget or StepBudget()
        self._inbox: queue.SimpleQueue[_Task[R] | tuple[Hashable, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.arrival = Interrupt()
        """Set when something has come in: a call of several steps had better end."""
        self._ready: list[_Task[R]] = []
        self._prepared: Future[None] = Future()
        self.failures = Failures(service)
        self._thread = threading.Thread(target=self._main, name=f"{service}-engine", daemon=True)

    @abstractmethod
    def run_batch(self, wants: Sequence[Draw]) -> Sequence[R]:
        """What comes of each want, of one call of the model for all."""

    def steps_of(self, want: Draw, result: R) -> int:
        """How many steps of the model a result took."""
        return 1

    @property
    def waiting(self) -> int:
        """Work that waits for the model, or for the rest of its steps."""
        return self._inbox.qsize() + len(self._ready)

    def start(self) -> Future[None]:
        """Start the thread; the future is done when it is prepared, or has what that raised."""
        self._thread.start()
        return self._prepared

    def stop(self) -> None:
        """End the thread after the call at hand; work not done fails with `UnavailableError`."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join()

    def add(self, owner: Hashable, work: Work[R], fail: Callable[[Exception], None]) -> None:
        """Queue work; its owner has no other under way."""
        self._put(_Task(owner, work, fail))

    def nudge(self) -> None:
        """End a call of several steps after the one at hand: its work has reason to look around."""
        self._put(_NUDGE)

    def drop(self, owner: Hashable, release: Callable[[], None]) -> None:
        """End the owner's work before its next step, then `release` what the owner holds."""
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
        while self._gather():
            self.step()
        for task in self._ready:
            task.fail(UnavailableError(f"the {self._service} service is shutting down"))

    def _gather(self) -> bool:
        """Take in what has arrived, waiting when there is nothing to do; False to stop."""
        arrived: list[_Task[R]] = []
        while True:
            self.arrival.clear()  # what is put from here on sets it again
            try:
                item = self._inbox.get(block=not (self._ready or arrived))
            except queue.Empty:
                # Only now, so that work whose owner has left by now never begins.
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
            log.exception("a session could not be closed")

    def step(self) -> None:
        """Run what fits of what is ready, and hand over what is complete."""
        ready = self._ready
        if len(ready) > 1:
            ready.sort(key=lambda task: task.since_ns)
        counts = allot([task.pieces for task in ready], self._budget)
        self._ready = [task for task, count in zip(ready, counts, strict=True) if not count]
        chosen = [(t, t.pieces.take(n)) for t, n in zip(ready, counts, strict=True) if n]
        # All run as many steps: whoever wants fewer, or waits, is not held up by the others.
        steps = min([1 if t.pieces.remaining else t.want.max_tokens for t in ready])
        wants = [task.want.part(piece, steps) for task, piece in chosen]
        began = perf_counter_ns()
        results = self._attempt(wants)
        elapsed = perf_counter_ns() - began
        if steps > 1:
            steps = max(map(self._steps, [task.want for task, _ in chosen], results))
        self._on_step(elapsed // steps, len(chosen), sum(counts), 1)
        if steps > 1:  # behind the first one, a token each
            self._on_step(elapsed // steps, len(chosen), len(chosen), steps - 1)
        for (task, _), result in zip(chosen, results, strict=True):
            task.began_ns = task.began_ns or began
            task.model_ns += elapsed
            if isinstance(result, Exception):
                going_on = task.go_on(result)
            elif task.pieces.remaining:
                going_on = True
            else:
                going_on = task.go_on(Ran(result, task.began_ns, task.model_ns))
            if going_on:
                self._ready.append(task)

    def _steps(self, want: Draw, result: R | Exception) -> int:
        return 1 if isinstance(result, Exception) else self.steps_of(want, result)

    def _attempt(self, wants: Sequence[Draw]) -> Sequence[R | Exception]:
        """What each gives; where the batch fails, each gets a try of its own."""
        try:
            results = self.run_batch(wants)
        except Exception as error:
            if not isinstance(error, FlyspecError):
                log.exception("a step of %d sequences failed", len(wants))
            if len(wants) == 1:
                known = isinstance(error, FlyspecError)
                return [error if known else self.failures.failed(error)]
        else:
            self.failures.worked()
            return results
        return [result for want in wants for result in self._attempt([want])]
