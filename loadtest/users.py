"""Locust users: a closed loop, and arrivals. Import `loadtest.patched` first.

Their measurements go to locust's statistics too: `Generate` rows end to end, with failures, `TTFT`
and `TPOT` rows next to them, and separate rows `refused` and `cancelled`, which are no failures.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gevent
from locust import User, task

from flyspec.errors import FlyspecError, ResourceExhaustedError
from loadtest.load import Control, LoadPhase, Open, Record, StreamEnd

PAUSE_S = 0.1
"""After a failure, and after a refusal that did not say when to retry."""


class GenerateUser(User):
    """Asks for generations while a phase is on, and measures them.

    In a closed loop, each of several users makes one request after the other, and after a refusal
    it waits as told. Arrivals need one user alone, which sends requests when they are due.
    """

    @task
    def generate(self) -> None:
        """Make the next request, or all that arrive in the phase."""
        control: Control = self.environment.flyspec_control
        control.opened.wait()
        phase = control.phase
        assert phase is not None
        if isinstance(phase.load, Open):
            self._arrivals(control, phase, phase.load)
            return
        record = self._request(control)
        if record.outcome in ("refused", "failed"):
            gevent.sleep(PAUSE_S if record.retry_after_s is None else record.retry_after_s)

    def _arrivals(self, control: Control, phase: LoadPhase, load: Open) -> None:
        for due in control.arrivals(phase, load):
            planned = control.phase_began + due
            gevent.sleep(max(0.0, planned - control.now()))
            if not control.opened.is_set():
                break
            gevent.spawn(self._request, control, planned)
        while control.opened.is_set() and control.phase is phase:
            gevent.sleep(0.05)

    def _request(self, control: Control, planned: float | None = None) -> Record:
        """Make the next request, due now or at `planned`, and keep its record."""
        control.in_flight += 1
        try:
            record = measure(control, planned)
        finally:
            control.in_flight -= 1
        control.records.append(record)
        count(self.environment, record)
        return record


def measure(control: Control, planned: float | None) -> Record:
    """Make a request of the phase, due now or at `planned`, and return its record."""
    phase, prompt, now = control.phase, control.next_prompt(), control.now()
    assert phase is not None, "no phase is on"
    options, leave_after_s = phase.draw(control.rng)
    record = Record(phase.name, now if planned is None else planned, now, outcome="cancelled")
    try:
        with (
            gevent.Timeout(leave_after_s, False),
            closing(control.transport.stream(prompt, options)) as stream,
        ):
            for piece in stream:
                if isinstance(piece, StreamEnd):
                    record.outcome, record.tokens, record.rounds = (
                        "complete", piece.tokens, piece.rounds
                    )  # fmt: skip
                elif piece:
                    record.first = control.now() if record.first is None else record.first
                    record.tokens += len(piece)
    except (FlyspecError, ValueError) as error:  # ValueError: a closed channel, a bad request
        record.outcome = "failed"
        record.error = f"{getattr(error, 'status', type(error).__name__)}: {error}"
        if isinstance(error, ResourceExhaustedError):
            record.outcome, record.retry_after_s = "refused", error.retry_after_s
    record.ended = control.now()
    return record


def count(environment: Any, record: Record) -> None:
    """Add to locust's statistics. Rows next to the requests' own do not count as requests."""
    name, entries = record.phase, environment.stats.entries
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
