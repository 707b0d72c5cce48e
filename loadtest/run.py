"""Runs a scenario with locust and makes its document. Import `loadtest.patched` first."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import gevent
from locust.env import Environment

from loadtest import options as flags
from loadtest.admin import Admin, Occupancy
from loadtest.connection import Endpoint
from loadtest.control import Control
from loadtest.goals import Check
from loadtest.prompts import FRESH, Source, prompt_mix
from loadtest.record import Record
from loadtest.report.document import VERSION, short
from loadtest.sampler import Sampler
from loadtest.scenarios import SCENARIOS, World
from loadtest.summary import PhaseResult, timeline
from loadtest.users.grpc import GrpcTransport
from loadtest.users.loops import ClosedLoopUser, GenerateUser, OpenLoopUser, user_class_of
from loadtest.work import Closed, Phase

UNTOLD = frozenset((
    "api_key", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_target_name", "address",
    "admin_address", "watch", "html", "json", "plot", "records", "scenario",
))  # fmt: skip
"""Flags that the report does not repeat."""
MAX_SPAWN_RATE = 100
SETTLE_S = 10.0
"""So long may sessions take to close after the last request."""
BESIDE_S = 120.0
"""So long may what goes on beside the load take after it."""
LATE_MS = 100.0
"""p99 of how late requests are sent, beyond which the generator measures itself."""


class Interrupted(BaseException):
    """Somebody asked the test to stop."""


class LoadTest:
    """One run of a scenario. `say` is told what goes on."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say = args, say
        self._goals = flags.goals_of(args)
        endpoint = flags.endpoint_of(args)
        self._transport = GrpcTransport(endpoint, args.connections)
        sources = args.prompt_file or [Source(FRESH)]
        self._control = Control(
            self._transport, prompt_mix(sources, args.problems, args.chat, args.seed), args.seed
        )
        admin = (
            Admin(Endpoint(args.admin_address, endpoint.credentials))
            if args.admin_address
            else None
        )
        self._world = World(
            admin, note=self._note, sleep=gevent.sleep, records=self._control.records
        )
        self._done: list[PhaseResult] = []
        self._sampler = Sampler(flags.watched(args), admin, self._control.now, say)
        self._world.memory = self._sampler.memory
        self._events: list[dict[str, Any]] = []
        self._interrupted = False
        self._who: type[GenerateUser] | None = None

    def run(self) -> dict[str, Any]:
        """All of it; the document. Raises `FlyspecError` if it cannot begin."""
        server = self._server()
        before = self._world.admin.status() if self._world.admin else None
        self._world.slots = before.slots if before else None
        args = self._args
        scenario = SCENARIOS[args.scenario](args, flags.generate_options(args), self._world)
        begun = datetime.datetime.now(datetime.UTC)
        environment = Environment(user_classes=[ClosedLoopUser, OpenLoopUser])
        environment.flyspec_control = self._control  # type: ignore[attr-defined]
        runner = environment.create_local_runner()
        looking = gevent.spawn(self._look)
        beside, load_is_on = gevent.spawn(scenario.beside), True
        self._world.running = lambda: load_is_on
        trouble: list[Check] = []
        try:
            for phase in scenario.phases(self._done):
                self._phase(runner, phase, beside)
        except Interrupted:
            self._interrupted = True
        finally:
            load_is_on = False
            self._control.close_phase()
            trouble += self._end(beside)
            runner.quit()
            looking.kill()
        seconds = self._control.now()
        records = self._control.records
        self._done[:] = [self._result(r.phase, r.began, r.sent_until, r.busy) for r in self._done]
        checks = [
            *self._goals.check(self._done), *self._left(before), *scenario.checks(self._done),
            *trouble,
        ]  # fmt: skip
        document = {
            "version": VERSION,
            "scenario": scenario.name,
            "about": scenario.about,
            "passed": all(check.passed for check in checks) and not self._interrupted,
            "begun": begun.strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": seconds,
            "server": server,
            "generator": {"cores": os.cpu_count(), "python": platform.python_version()},
            "options": self._options(),
            "found": scenario.found(self._done),
            "checks": [{"name": c.name, "passed": c.passed, "said": c.said} for c in checks],
            "warnings": self._warnings(),
            "phases": [result.to_document() for result in self._done],
            "errors": _counted(records),
            "events": self._events,
            "memory": self._sampler.memory_document(),
            "status": self._sampler.status_document(),
            "timeline": timeline(records, seconds),
        }
        found: dict[str, Any] = short(document)
        return found

    @property
    def records(self) -> Sequence[Record]:
        """Every request."""
        return self._control.records

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()
        if self._world.admin:
            self._world.admin.close()

    # --- phases ---------------------------------------------------------------------------------

    def _phase(self, runner: Any, phase: Phase, beside: gevent.Greenlet[..., None]) -> None:
        """One phase: its users, its time, and the end of what it began."""
        control = self._control
        users = phase.load.users if isinstance(phase.load, Closed) else 1
        self._spawn(runner, user_class_of(phase.load), users)
        self._say(f"{phase.name}: {phase.load} for {phase.seconds:.0f} s")
        used, began = time.process_time(), control.now()
        control.open_phase(phase)
        try:
            until = began + phase.seconds
            while (left := until - control.now()) > 0:
                gevent.sleep(min(0.2, left))
                if beside.ready() and not beside.successful():
                    raise Interrupted
        finally:
            control.close_phase()
            busy = (time.process_time() - used) / max(1e-9, control.now() - began)
            self._done.append(self._result(phase, began, control.now(), busy))
        if phase.drain:
            self._drain()
            self._done[-1] = self._result(phase, began, self._done[-1].sent_until, busy)

    def _spawn(self, runner: Any, who: type[GenerateUser], users: int) -> None:
        """Let so many users of that kind be there, and no others: locust keeps who is there."""
        if self._who is not who:
            runner.start(0, MAX_SPAWN_RATE)
            runner.spawning_greenlet.join()
            self._who = who
        runner.start(users, min(users, MAX_SPAWN_RATE), user_classes=[who])
        runner.spawning_greenlet.join()

    def _drain(self) -> None:
        """Wait for what is under way; every request has a deadline."""
        until = self._control.now() + self._args.timeout + SETTLE_S
        while self._control.in_flight and self._control.now() < until:
            gevent.sleep(0.02)

    def _result(self, phase: Phase, began: float, until: float, busy: float) -> PhaseResult:
        records = [r for r in self._control.records if r.phase == phase.name]
        return PhaseResult.of(phase, began, until, busy, records, self._goals.latency)

    def _end(self, beside: gevent.Greenlet[..., None]) -> list[Check]:
        """Wait for everything to end; what went wrong beside the load."""
        if self._interrupted:
            beside.kill(Interrupted, timeout=BESIDE_S)
        beside.join(timeout=BESIDE_S)
        self._drain()
        trouble = []
        if not beside.ready():
            beside.kill(block=False)
            trouble.append(Check("operator", False, f"was not done {BESIDE_S:g} s after the load"))
        elif not beside.successful() and not isinstance(beside.exception, Interrupted):
            trouble.append(Check("operator", False, f"was told: {beside.exception}"))
        if self._interrupted:
            trouble.append(Check("interrupted", False, "the test was stopped before its end"))
        return trouble

    def _left(self, before: Occupancy | None) -> list[Check]:
        """Nothing may be open that was not before, and the target must be the same process."""
        admin = self._world.admin
        if admin is None or before is None:
            return []
        until = self._control.now() + SETTLE_S
        while True:
            after = admin.status()
            more = {n: count for n, count in after.left.items() if count > before.left[n]}
            if not more or self._control.now() > until:
                break
            gevent.sleep(0.1)
        lost = [a for a, p in before.processes.items() if after.processes.get(a) != p]
        said = ", ".join(f"{count} {name}" for name, count in more.items()) or "nothing"
        target = f"restarted or lost: {', '.join(lost)}" if lost else "the same process as before"
        return [
            Check("left open", not more, f"{said} more than before"),
            Check("target", not lost, target),
        ]

    # --- what is seen ---------------------------------------------------------------------------

    def _server(self) -> dict[str, Any]:
        """What answers there."""
        models = self._transport.list_models()
        target = models.target
        return {
            "target": target.name,
            "dtype": target.dtype,
            "device": target.device,
            "num_parameters": target.num_parameters,
            "drafters": list(models.drafters),
        }

    def _look(self) -> None:
        while True:
            self._sampler.look()
            gevent.sleep(self._args.every)

    def _note(self, text: str) -> None:
        self._events.append({"seconds": self._control.now(), "text": text})
        self._say(text)

    def _warnings(self) -> list[str]:
        late = [r for r in self._done if r.figures.late_p99_ms > LATE_MS]
        return [
            f"{r.phase.name}: requests left {r.figures.late_p99_ms:.0f} ms late (p99): the load "
            "generator is too slow for its own load, and its own figures are measured"
            for r in late
        ]

    def _options(self) -> dict[str, Any]:
        """The flags, as plain values; no secrets, no addresses, no names of files."""
        return {
            name: value if isinstance(value, int | float | str | bool) else _plain(value)
            for name, value in vars(self._args).items()
            if name not in UNTOLD and value not in (None, "", [])
        }


def _counted(records: Sequence[Record]) -> dict[str, int]:
    """What went wrong, counted; the ten most frequent."""
    failed = Counter(record.error for record in records if record.outcome == "failed")
    return dict(failed.most_common(10))


def _plain(value: Any) -> Any:
    """A flag's value in words."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Source):
        name = os.path.basename(value.name)
        return name if value.weight == 1.0 else f"{name}:{value.weight:g}"
    return value if isinstance(value, int | float | str | bool) else getattr(value, "name", "")
