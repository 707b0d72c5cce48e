"""Locust users: a closed loop, and arrivals. Import `loadtest.patched` first.

Their measurements go to locust's statistics too: `Generate` rows end to end, with failures, `TTFT`
and `TPOT` rows next to them, and separate rows `refused` and `cancelled`, which are no failures.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import gevent
from locust import User, task

from flyspec.errors import FlyspecError, ResourceExhaustedError
from flyspec.values.generation import RecoveryKind
from loadtest.control import Control
from loadtest.record import Record
from loadtest.transport import StreamEnd
from loadtest.work import Closed, Job, Open

PAUSE_S = 0.1
"""After a failure, and after a refusal that did not say when to retry."""


class GenerateUser(User):
    """Asks for generations and measures them."""

    abstract = True

    @property
    def control(self) -> Control:
        found: Control = self.environment.flyspec_control
        return found

    def request(self, planned: float | None = None) -> Record:
        """Make the next request, due now or at `planned`, and hand in its record."""
        control = self.control
        control.in_flight += 1
        try:
            record = measure(control, control.next_job(planned))
        finally:
            control.in_flight -= 1
        control.add(record)
        report(self.environment, record)
        return record


class ClosedLoopUser(GenerateUser):
    """One request after the other while a phase is on; after a refusal it waits as told."""

    @task
    def generate(self) -> None:
        self.control.opened.wait()
        record = self.request()
        if record.outcome == "refused":
            gevent.sleep(PAUSE_S if record.retry_after_s is None else record.retry_after_s)
        elif record.outcome == "failed":
            gevent.sleep(PAUSE_S)


class OpenLoopUser(GenerateUser):
    """Sends requests when they are due, whatever happened to earlier ones. One is enough."""

    @task
    def arrivals(self) -> None:
        control = self.control
        control.opened.wait()
        phase = control.phase
        assert phase is not None
        assert isinstance(phase.load, Open)
        for due in control.arrivals(phase, phase.load):
            planned = control.phase_began + due
            gevent.sleep(max(0.0, planned - control.now()))
            if not control.opened.is_set():
                break
            gevent.spawn(self.request, planned)
        while control.opened.is_set() and control.phase is phase:
            gevent.sleep(0.05)


def user_class_of(load: Closed | Open) -> type[GenerateUser]:
    return OpenLoopUser if isinstance(load, Open) else ClosedLoopUser


def measure(control: Control, job: Job) -> Record:
    sent, first, tokens = control.now(), None, 0
    token_ids: list[int] = []
    arrivals: list[float] = []
    end: StreamEnd | None = None
    stream, leaving, error = None, None, None
    try:
        stream = control.transport.open(job.prompt, job.options)
        if job.leave_after_s is not None:
            leaving = gevent.spawn_later(job.leave_after_s, stream.cancel)
        for piece in stream:
            if isinstance(piece, StreamEnd):
                end = piece
            elif piece:
                first = control.now() if first is None else first
                tokens += len(piece)
                if job.text is not None:
                    token_ids += piece
                    arrivals.append(control.now())
    except (FlyspecError, ValueError) as raised:  # ValueError: a closed channel, a bad request
        error = raised
    finally:
        left = leaving is not None and leaving.ready()
        if leaving is not None:
            leaving.kill(block=False)
        if stream is not None and end is None:
            stream.cancel()
    ended = control.now()

    def record(outcome: Any, **more: Any) -> Record:
        return Record(
            job.phase, job.variant, job.planned, sent, ended, outcome, first, arrivals=arrivals,
            **more,
        )  # fmt: skip

    if end is not None:
        recovered = end.recoveries
        pauses = [r.delay_ns / 1e6 for r in recovered if r.kind is RecoveryKind.DRAFTER_SWAPPED]
        return record(
            "complete", tokens=end.tokens, rounds=end.rounds, moves=len(pauses),
            longest_pause_ms=max(pauses, default=0.0),
            recoveries=Counter(r.kind.name for r in recovered),
            differs=job.text is not None and job.text.differs(token_ids),
        )  # fmt: skip
    if left:
        return record("cancelled", tokens=tokens)
    if isinstance(error, ResourceExhaustedError):
        return record("refused", retry_after_s=error.retry_after_s, error=str(error))
    status = getattr(error, "status", type(error).__name__)
    return record("failed", tokens=tokens, error=f"{status}: {error}")


def report(environment: Any, record: Record) -> None:
    """Add to locust's statistics. Rows next to the requests' own do not count as requests."""
    name, entries = record.variant, environment.stats.entries
    elapsed = 1e3 * (record.ended - record.planned)
    if record.outcome in ("refused", "cancelled"):
        entries[name, record.outcome].log(elapsed, 0)
        return
    environment.events.request.fire(
        request_type="Generate", name=name, response_time=elapsed, response_length=record.tokens,
        exception=FlyspecError(record.error) if record.outcome == "failed" else None, context={},
    )  # fmt: skip
    for row, value in (("TTFT", record.metric("ttft")), ("TPOT", record.metric("tpot"))):
        if value is not None:
            entries[name, row].log(value, 0)
