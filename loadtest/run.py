"""Runs a scenario with locust and makes its report. Call `run_test` with `loadtest.patched` only.

Everything that is locust's is imported late, since locust patches the standard library.
"""

from __future__ import annotations

import datetime
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, ClassVar

import gevent

from flyspec.client import GenerateOptions, Status
from flyspec.errors import FlyspecError
from flyspec_lab.report import Report, Section
from loadtest.figures import Check, PhaseResult, check_goals
from loadtest.load import Closed, Control, LoadPhase
from loadtest.options import LoadOptions
from loadtest.protocols import status_at
from loadtest.report import NOTES, checked, curves, phase_table
from loadtest.sampler import Sampler, left_open, slots

SPAWN_RATE = 100
SETTLE_S = 10.0
"""Time for sessions to close after the last request."""
SAMPLE_S = 0.5
MAX_LATE_MS = 100.0
"""p99 of how late requests are sent, beyond which the generator measures itself."""


class Interrupted(BaseException):
    """The test was asked to stop."""


def describe(options: GenerateOptions) -> str:
    """Return the options of requests in a few words."""
    k = options.num_speculative_tokens
    if k == 0:
        return "K = 0"
    rule = options.rule.name if options.rule else "default rule"
    return f"{rule}, K = {k}" if k is not None else rule


def run_test(kind: type[LoadTest], load: LoadOptions, own: Any, say: Callable[[str], None]) -> int:
    """Run a test and write its report; the exit code. Raises `FlyspecError` if it cannot begin."""
    main = gevent.getcurrent()
    for signal_ in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(signal_, gevent.kill, main, Interrupted)
    load.validate()
    control = load.control()
    with closing(control.transport):
        try:
            report = kind(load, own, control, say).run()
        except Interrupted:
            say("stopped before it began")
            return 2
    return load.results.finish(report)


class LoadTest(ABC):
    """A scenario, run against an installation with its own flags `own`, and told to `say`.

    `defaults_of_load` and `defaults` are the defaults of its flags. `slots` are the generations
    that the installation runs at once, None if unknown. `found` has figures for the JSON, `lines`
    sentences, `checks` what had to hold.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    defaults_of_load: ClassVar[LoadOptions] = LoadOptions()
    defaults: ClassVar[Any]

    def __init__(
        self, load: LoadOptions, own: Any, control: Control, say: Callable[[str], None] = print
    ) -> None:
        self.load, self.own, self.control, self.say = load, own, control, say
        self.seconds, self.options = load.seconds, load.requests.options()
        self.sampler = Sampler(dict(load.watch), control.now, lambda: len(control.records))
        self.slots: int | None = None
        self._phases: list[tuple[LoadPhase, float, float]] = []  # with begin and end of sending
        self.found, self.lines, self.checks = dict[str, Any](), list[str](), list[Check]()

    @abstractmethod
    def phases(self) -> Iterator[LoadPhase]:
        """Yield the load, phase by phase."""

    @abstractmethod
    def judge(self, phases: Mapping[str, PhaseResult]) -> None:
        """Judge the phases, by name; raises KeyError if one did not take place."""

    def run(self) -> Report:
        """Run all of it. Raises `FlyspecError` if it cannot begin."""
        from locust.env import Environment

        from loadtest.users import GenerateUser

        try:
            target = self.control.transport.target()
        except FlyspecError as error:
            raise FlyspecError(f"{self.load.addresses[0]} does not answer: {error}") from None
        if before := self._status():  # knows more than HTTP tells
            target, self.slots = before.verify.model or target, slots(before)
        began = datetime.datetime.now(datetime.UTC)
        environment = Environment(user_classes=[GenerateUser])
        environment.flyspec_control = self.control  # type: ignore[attr-defined]
        runner = environment.create_local_runner()
        looking = gevent.spawn(self._look)
        try:
            for phase in self.phases():
                self._phase(runner, phase)
        except Interrupted:
            self.checks.append(Check("interrupted", False, "the test was stopped before its end"))
        finally:
            self.control.opened.clear()
            self._drain()
            runner.quit()
            looking.kill()
        done = self.done
        with suppress(KeyError):  # interrupted before a phase that it judges
            self.judge({result.name: result for result in done})
        checks = [*check_goals(self.load.goals, done), *self._left(before), *self.checks]
        late = [
            f"warning: {r.name}: requests were sent {r.figures.late_p99_ms:.0f} ms late (p99): the "
            "load generator is too slow for its own load and measures itself"
            for r in done
            if r.figures.late_p99_ms > MAX_LATE_MS
        ]
        lines = [*self.lines, *late, NOTES]
        options = self.load.shown(self.own)
        failed = (r.error for r in self.control.records if r.outcome == "failed")
        begun, seconds = began.strftime("%Y-%m-%d %H:%M UTC"), self.control.now()
        section = Section("Phases", lines, [phase_table(done)], curves(done))
        report = checked(checks, [section], {
            "scenario": self.name, "begun": begun, "seconds": seconds, "target": target,
            "options": options, "found": self.found, "phases": done,
            "errors": dict(Counter(failed).most_common(10)), "memory": self.sampler.memory,
        })  # fmt: skip
        return replace(
            report,
            title=f"flyspec load test: {self.name}",
            subtitle=f"{self.about}\n{begun} · {seconds:.0f} s · {target.name} over "
            f"{options['protocol']}",
            facts={"options": " ".join(f"{name}={value}" for name, value in options.items())},
        )

    def _status(self) -> Status | None:
        """Return the installation's status, if its admin address is known."""
        address = self.load.admin_address
        return status_at(address, self.load.credentials) if address else None

    # --- phases ---------------------------------------------------------------------------------

    def _phase(self, runner: Any, phase: LoadPhase) -> None:
        """Run a phase: its users, its duration, and the end of what it began."""
        control = self.control
        users = phase.load.users if isinstance(phase.load, Closed) else 1
        runner.start(users, min(users, SPAWN_RATE))
        runner.spawning_greenlet.join()
        self.say(f"{phase.name}: {phase.load} for {phase.seconds:.0f} s")
        began = control.now()
        control.open_phase(phase)
        try:
            gevent.sleep(phase.seconds)
        finally:
            control.opened.clear()
            self._phases.append((phase, began, control.now()))
        if phase.drain:
            self._drain()

    def _drain(self) -> None:
        """Wait for running requests; each has a deadline."""
        until = self.control.now() + self.load.requests.timeout_s + SETTLE_S
        while self.control.in_flight and self.control.now() < until:
            gevent.sleep(0.02)

    @property
    def done(self) -> list[PhaseResult]:
        """The phases that are over; requests of one that was not drained may still be running."""
        records, limits = self.control.records, self.load.goals.latency
        return [PhaseResult.of(*phase, records, limits) for phase in self._phases]

    def _look(self) -> None:
        while True:
            self.sampler.look()
            gevent.sleep(SAMPLE_S)

    def _left(self, before: Status | None) -> list[Check]:
        """Check that no more is open than before, and that targets are the same processes."""
        if before is None:
            return []
        until = self.control.now() + SETTLE_S
        while True:
            after, had = self._status() or before, left_open(before)
            more = {n: count for n, count in left_open(after).items() if count > had[n]}
            if not more or self.control.now() > until:
                break
            gevent.sleep(0.1)
        then, now = (
            {u.address: (u.process.instance_id, u.process.num_model_loads) for u in s.targets
             if u.ready}
            for s in (before, after)
        )  # fmt: skip
        lost = [address for address, process in then.items() if now.get(address) != process]
        said = ", ".join(f"{count} {name}" for name, count in more.items()) or "nothing"
        target = f"restarted or lost: {', '.join(lost)}" if lost else "the same process as before"
        return [
            Check("left open", not more, f"{said} more than before"),
            Check("target", not lost, target),
        ]
