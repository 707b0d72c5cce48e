"""Runs a scenario with locust and makes its report. Import `loadtest.patched` first."""

from __future__ import annotations

import datetime
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import gevent
from locust.env import Environment

from flyspec.client import Status
from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.report import Report
from loadtest.admin import Admin, left_open, slots
from loadtest.connection import Endpoint
from loadtest.control import Control
from loadtest.goals import Check
from loadtest.options import LoadOptions
from loadtest.prompts import prompt_mix
from loadtest.record import Record
from loadtest.report import VERSION, load_report, write_records
from loadtest.sampler import Sampler
from loadtest.scenarios import Scenario, ScenarioVerdict, World
from loadtest.summary import PhaseResult, timeline
from loadtest.users.loops import (
    ClosedLoopUser,
    GenerateUser,
    OpenLoopUser,
    measure,
    user_class_of,
)
from loadtest.users.protocols import TRANSPORTS
from loadtest.work import Closed, Job, LoadPhase, Text

MAX_SPAWN_RATE = 100
SETTLE_S = 10.0
"""Time for sessions to close after the last request."""
MEANWHILE_S = 120.0
"""Time for what runs beside the load to end after it."""
LATE_MS = 100.0
"""p99 of how late requests are sent, beyond which the generator measures itself."""


class Interrupted(BaseException):
    """The test was asked to stop."""


def run_test(
    scenario: type[Scenario[Any]], load: LoadOptions, own: Any, say: Callable[[str], None]
) -> int:
    """Run a test and write its report; the exit code. Raises `FlyspecError` if it cannot begin."""
    main = gevent.getcurrent()
    for number in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(number, gevent.kill, main, Interrupted)
    load.validate()
    test = LoadTest(scenario, load, own, say)
    try:
        report = test.run()
    except Interrupted:
        say("stopped before it began")
        return 2
    finally:
        test.close()
    if load.records is not None:
        write_records(load.records, map(asdict, test.records))
    return load.results.finish(report)


class LoadTest:
    """One run of a scenario, told to `say`."""

    def __init__(
        self,
        scenario: type[Scenario[Any]],
        load: LoadOptions,
        own: Any,
        say: Callable[[str], None],
    ) -> None:
        if scenario.needs_admin and not load.admin_address:
            raise ConfigError(f"{scenario.name} needs --admin-address")
        self._scenario, self._load, self._own, self._say = scenario, load, own, say
        link = load.connection
        self._transport = TRANSPORTS[link.protocol](load.endpoints(), link.connections)
        admin = (
            Admin(Endpoint(load.admin_address, load.credentials)) if load.admin_address else None
        )
        asked = load.requests
        sources = asked.prompt_file or scenario.sources(own)
        self._control = control = Control(
            self._transport, prompt_mix(sources, asked.problems, asked.chat, asked.seed), asked.seed
        )
        self._sampler = Sampler(
            dict(load.watch), admin, control.now, lambda: len(self.records), say
        )
        self._world = World(control, self._sampler, admin, note=self._note, ask=self._ask)
        self._done: list[PhaseResult] = []
        self._events: list[dict[str, Any]] = []
        self._trouble: list[Check] = []
        self._who: type[GenerateUser] | None = None

    @property
    def records(self) -> Sequence[Record]:
        return self._control.records

    def close(self) -> None:
        self._transport.close()
        if self._world.admin:
            self._world.admin.close()

    def run(self) -> Report:
        """Run all of it. Raises `FlyspecError` if it cannot begin."""
        models, admin = self._transport.list_models(), self._world.admin
        target, drafters, before = models.target, models.drafters, None
        if admin:  # knows more than HTTP tells
            before = admin.status()
            target = before.verify.model or target
            drafters = drafters or tuple(drafter.name for drafter in admin.drafters())
            self._world.slots = slots(before)
        self._world.vocab_size = target.vocab_size
        scenario, done = self._scenario(self._load, self._own, self._world), self._done
        begun = datetime.datetime.now(datetime.UTC)
        environment = Environment(user_classes=[ClosedLoopUser, OpenLoopUser])
        environment.flyspec_control = self._control  # type: ignore[attr-defined]
        runner = environment.create_local_runner()
        looking = gevent.spawn(self._look)
        try:
            for phase in scenario.phases(done):
                self._phase(runner, phase)
        except Interrupted:
            self._trouble.append(Check("interrupted", False, "the test was stopped before its end"))
        finally:
            self._control.close_phase()
            self._drain()
            runner.quit()
            looking.kill()
        seconds, goals = self._control.now(), self._load.goals
        done[:] = [self._result(r.phase, r.began, r.sent_until, r.busy) for r in done]
        try:
            verdict = scenario.judge({result.phase.name: result for result in done})
        except KeyError:  # interrupted before a phase that it judges
            verdict = ScenarioVerdict()
        failed = [record for record in self.records if record.outcome == "failed"]
        checks = [
            *goals.check(done, sum(map(scenario.excuses, failed))), *self._left(before),
            *verdict.checks, *self._trouble,
        ]  # fmt: skip
        server = {
            "target": target.name, "dtype": target.dtype, "device": target.device,
            "num_parameters": target.num_parameters, "drafters": list(drafters),
        }  # fmt: skip
        document = {
            "version": VERSION,
            "scenario": scenario.name,
            "about": scenario.about,
            "passed": all(check.passed for check in checks),
            "begun": begun.strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": seconds,
            "server": {name: value for name, value in server.items() if value},
            "generator": {"cores": os.cpu_count(), "python": platform.python_version()},
            "options": self._load.told(self._own),
            "found": verdict.found,
            "lines": verdict.lines,
            "checks": [asdict(check) for check in checks],
            "warnings": self._warnings(),
            "phases": [result.to_document() for result in done],
            "errors": dict(Counter(record.error for record in failed).most_common(10)),
            "events": self._events,
            "memory": self._sampler.memory_document(),
            "status": self._sampler.status_document(),
            "timeline": timeline(self.records, seconds),
        }
        return load_report(document)

    # --- phases ---------------------------------------------------------------------------------

    def _phase(self, runner: Any, phase: LoadPhase) -> None:
        """One phase: its users, its duration, and the end of what it began."""
        control = self._control
        users = phase.load.users if isinstance(phase.load, Closed) else 1
        self._spawn(runner, user_class_of(phase.load), users)
        self._say(f"{phase.name}: {phase.load} for {phase.seconds:.0f} s")
        used, began = time.process_time(), control.now()
        control.open_phase(phase)
        meanwhile = gevent.spawn(phase.meanwhile or (lambda: None))
        try:
            until = began + phase.seconds
            while (left := until - control.now()) > 0:
                gevent.sleep(min(0.2, left))
                if meanwhile.ready() and not meanwhile.successful():
                    break
        except Interrupted:
            meanwhile.kill(timeout=MEANWHILE_S)
            raise
        finally:
            control.close_phase()
            busy = (time.process_time() - used) / max(1e-9, control.now() - began)
            self._done.append(self._result(phase, began, control.now(), busy))
        if phase.drain:
            self._drain()
            self._done[-1] = self._result(phase, began, self._done[-1].sent_until, busy)
        meanwhile.join(timeout=MEANWHILE_S)
        said = str(meanwhile.exception)
        if not meanwhile.ready():
            meanwhile.kill(block=False)
            said = f"was not done {MEANWHILE_S:g} s after the load"
        if not meanwhile.successful():
            self._trouble.append(Check("operator", False, said))
            raise Interrupted

    def _spawn(self, runner: Any, who: type[GenerateUser], users: int) -> None:
        """Have so many users of that kind and no others; locust keeps those that exist."""
        if self._who is not who:
            runner.start(0, MAX_SPAWN_RATE)
            runner.spawning_greenlet.join()
            self._who = who
        runner.start(users, min(users, MAX_SPAWN_RATE), user_classes=[who])
        runner.spawning_greenlet.join()

    def _drain(self) -> None:
        """Wait for running requests; each has a deadline."""
        until = self._control.now() + self._load.requests.timeout_s + SETTLE_S
        while self._control.in_flight and self._control.now() < until:
            gevent.sleep(0.02)

    def _result(self, phase: LoadPhase, began: float, until: float, busy: float) -> PhaseResult:
        records = [r for r in self.records if r.phase == phase.name]
        return PhaseResult.of(phase, began, until, busy, records, self._load.goals.latency)

    def _left(self, before: Status | None) -> list[Check]:
        """Nothing may be open that was not before, and targets must be the same processes."""
        admin = self._world.admin
        if admin is None or before is None:
            return []
        until = self._control.now() + SETTLE_S
        while True:
            after, had = admin.status(), left_open(before)
            more = {n: count for n, count in left_open(after).items() if count > had[n]}
            if not more or self._control.now() > until:
                break
            gevent.sleep(0.1)
        then, now = (
            {u.address: (u.process.instance_id, u.process.num_model_loads) for u in s.targets
             if u.ready and u.address not in self._world.killed}
            for s in (before, after)
        )  # fmt: skip
        lost = [address for address, process in then.items() if now.get(address) != process]
        said = ", ".join(f"{count} {name}" for name, count in more.items()) or "nothing"
        target = f"restarted or lost: {', '.join(lost)}" if lost else "the same process as before"
        return [
            Check("left open", not more, f"{said} more than before"),
            Check("target", not lost, target),
        ]

    # --- for scenarios --------------------------------------------------------------------------

    def _ask(self, text: Text) -> None:
        """Generate a text, unmeasured. Raises `FlyspecError` if that fails."""
        record = measure(self._control, Job("", "", text.prompt, text.options, text=text))
        if record.outcome != "complete":
            raise FlyspecError(f"a request failed before anything was disturbed: {record.error}")

    def _look(self) -> None:
        while True:
            self._sampler.look()
            gevent.sleep(self._load.every)

    def _note(self, text: str) -> None:
        self._events.append({"seconds": self._control.now(), "text": text})
        self._say(text)

    def _warnings(self) -> list[str]:
        return [
            f"{r.phase.name}: requests were sent {r.figures.late_p99_ms:.0f} ms late (p99): the "
            "load generator is too slow for its own load and measures itself"
            for r in self._done
            if r.figures.late_p99_ms > LATE_MS
        ]
