"""The whole stack on this machine: three services as children of this process.

Starts them, waits until they are ready, notices when one dies, and stops them. Used by `serve`,
`generate --local`, `bench`, `eval` and tests. Prints nothing: `on_stage` gets what each service is
doing to become ready, `on_event` other events, `on_log` the services' log lines.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from flyspec.cli.fork_server import ForkServer, can_fork
from flyspec.cli.preflight import check_services
from flyspec.cli.service import MODEL_IMPORTS, Child, ServiceDiedError, child_environment
from flyspec.cli.stack_options import PORTS, StackOptions
from flyspec.concurrency import all_or_first_error
from flyspec.config import NO_PORT
from flyspec.model_files import size_problem, weight_bytes
from flyspec.openmp import openmp_environment
from flyspec.process import available_cores
from flyspec.startup import READY

T = TypeVar("T")

_MODULES = {"verify": "verify_service", "draft": "draft_service", "orchestrator": "orchestrator"}

OnStage = Callable[[str, str], None]
"""Called with a service and what it does next."""


def _ignore(*_: str) -> None: ...


def torch_threads() -> int:
    """Return the threads for a model served by torch on a CPU.

    Draft and target take turns, but torch's threads hold their cores, so each gets half.
    """
    return max(1, available_cores() // 2)


class Stack:
    """Draft, verify and orchestrator services. `async with Stack(options) as stack: ...`."""

    def __init__(
        self,
        options: StackOptions | None = None,
        on_stage: OnStage = _ignore,
        on_event: Callable[[str], None] = _ignore,
        on_log: Callable[[str], None] = _ignore,
    ) -> None:
        self.options = (options or StackOptions()).resolved()
        self.services: dict[str, Child] = {}
        self.say = on_event
        self.on_stage = on_stage
        self.fork_server: ForkServer | None = None
        self._on_log = on_log
        self._checked = False

    @property
    def address(self) -> str:
        return self.options.address

    @property
    def admin_address(self) -> str:
        return self.options.admin_address

    @property
    def http_url(self) -> str | None:
        """Base URL of the HTTP API; None without one."""
        return self.options.http_url

    @property
    def missing(self) -> dict[str, str]:
        """Drafters that had not answered when the orchestrator was ready, and why."""
        missing: dict[str, str] = self.services["orchestrator"].facts.get("missing", {})
        return missing

    def flags(self, name: str) -> list[str]:
        """Return the flags with which a service is started."""
        return self.options.flags(name)

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.stop(0.0)
            raise self._not_ready("the stack") from None
        except BaseException:
            await self.stop(0.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a service dies, and raise its error."""
        waits = {asyncio.ensure_future(s.process.wait()): s for s in self.services.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        raise await waits[done.pop()].failure()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; if a service dies meanwhile, cancel it and raise the service's error."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is None:
                return task.result()
            if not watch.done():  # the call may fail just before its service exits
                await asyncio.wait([watch], timeout=0.2)
            return await (watch if watch.done() else task)  # type: ignore[return-value]
        except asyncio.CancelledError:
            task.cancel()  # it may still return what it has reached
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and task.exception() is None:
                return task.result()
            raise
        finally:
            for pending in (task, watch):
                pending.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def restart(self, name: str) -> None:
        """Restart a service on its old ports once it has ended. Raises if it does not start."""
        await self.services[name].buried()
        service = await self._launch(name)
        self._run(service)
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._ready(service)
        except TimeoutError:
            service.send(signal.SIGKILL)
            raise self._not_ready(f"the {name} service") from None
        self.say(f"the {name} service is ready")

    def _not_ready(self, what: str) -> ServiceDiedError:
        return ServiceDiedError(f"{what} was not ready after {self.options.start_timeout_s:.0f} s")

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop all services, draining the orchestrator first; kill those that remain."""
        grace = self.options.drain_grace_s if grace_s is None else grace_s
        if self.fork_server is not None and not all(s.pid for s in self.services.values()):
            await self.fork_server.close()  # some are not even forked
        try:
            for names in (("orchestrator",), ("draft", "verify")):
                services = [self.services[n] for n in names if n in self.services]
                for service in services:
                    service.send(signal.SIGTERM)
                ends = [asyncio.ensure_future(s.process.wait()) for s in services]
                if ends:
                    await asyncio.wait(ends, timeout=grace + 2.0)
        finally:
            for service in self.services.values():
                service.send(signal.SIGKILL)
            for service in self.services.values():
                await service.ended()
            if self.fork_server is not None:
                await self.fork_server.close()

    def check(self) -> None:
        """Find errors before a large model is loaded; download models that are on a hub. Once."""
        from flyspec.rule_files import load_rules

        if self._checked:
            return
        o = self.options
        load_rules(o.rules_file or "", o.rule, o.num_speculative_tokens)
        # Those of benchmarks have other settings.
        check_services({name: self.flags(name) for name in _MODULES if name not in o.modules})
        if o.draft_model and o.draft_model != o.model:  # benchmarks let a model draft for itself
            problem = size_problem(weight_bytes(str(o.model)), weight_bytes(o.draft_model))
            if problem:
                self.say(f"warning: {problem}")
        self._checked = True

    async def _start(self) -> None:
        self.check()
        o = self.options
        if can_fork([o.device, o.draft_device or o.device]):
            self.fork_server = ForkServer()
            await self.fork_server.start(child_environment(torch_threads(), self._openmp))
        # The orchestrator's imports need no torch, and are of use to the others.
        orchestrator = await self._launch("orchestrator")
        first = [await self._launch("verify"), await self._launch("draft")]
        for service in first:
            self._run(service)
        await self.guard(all_or_first_error([self._ready(service) for service in first]))
        self._run(orchestrator)
        await self.guard(self._ready(orchestrator))

    async def _launch(self, name: str) -> Child:
        """Start a service's process, which imports what it needs; a restarted one has its facts."""
        was, server = self.services.get(name), self.fork_server
        if name == "orchestrator":
            if was is not None:  # by now the server has imported more than it needs
                server = None
            imports: Sequence[str] = ["orchestrator.server"]
            if self.options.http_port != NO_PORT:
                imports = ["orchestrator.server", "orchestrator.front.http.server"]
        elif name == "verify" or self.options.draft_model:
            imports = MODEL_IMPORTS
            self.on_stage(name, "importing torch and transformers")
        else:
            imports = ["draft_service.server"]
        service = await Child.launch(
            name, self._threads(name), self._on_log, imports, server, self._openmp
        )
        if was is not None:
            service.facts = was.facts  # until it announces its own
        self.services[name] = service
        return service

    def _run(self, service: Child) -> None:
        """Run a service in its process; a restarted one keeps its metrics port."""
        name = service.name
        environment = {"OMP_NUM_THREADS": str(self._threads(name))}
        if port := service.facts.get("metrics_port"):
            environment[f"FLYSPEC_{name.upper()}_METRICS_PORT"] = str(port)
        service.run(self.options.modules.get(name, _MODULES[name]), self.flags(name), environment)

    @property
    def _openmp(self) -> dict[str, str]:
        return openmp_environment(str(self.options.model), self.options.heads or "")

    def _threads(self, name: str) -> int:
        o = self.options
        threads = {"verify": o.threads, "draft": o.draft_threads, "orchestrator": 1}[name]
        return threads or torch_threads()

    async def _ready(self, service: Child) -> None:
        await service.ready(partial(self.on_stage, service.name))
        ports = PORTS[service.name]
        found = {option: service.facts.get(fact, NO_PORT) for option, fact in ports.items()}
        self.options = replace(self.options, **found)
        self.on_stage(service.name, READY)
