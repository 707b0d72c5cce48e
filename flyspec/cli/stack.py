"""The whole stack on this machine: three services as children of this process.

Belongs here: starting them, waiting until they are warm, noticing that one died, stopping them.
Used by `serve`, `generate --local`, `bench`, `eval` and tests. No terminal output: what happens is
told to `on_event`, what the services log to `on_log`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from flyspec.cli.options.stack import ModelFlags, setting, to_flags
from flyspec.cli.service import ROOT, Child, ServiceDiedError
from flyspec.config import DraftSettings, OrchestratorSettings, VerifySettings, from_command_line
from flyspec.errors import ConfigError
from flyspec.flags import Flag, LogLevel
from flyspec.process import available_cores
from flyspec.speculation_length import AUTO, SpeculationLength, read_speculation_length

T = TypeVar("T")

DEMO_MODELS = ROOT / "demo" / "models"
LOOPBACK = "127.0.0.1"
_PORTS = "Where to listen"
_port = partial(Flag, min=0, group=_PORTS)
_orchestrator = partial(setting, OrchestratorSettings)


def _ignore(_: str) -> None:
    """Take a line and do nothing with it."""


def torch_threads() -> int:
    """Threads that a model on a CPU gets if it is served by torch, whose threads hold their cores.

    Draft and target take turns, but a share each keeps them from being in the way.
    """
    return max(1, available_cores() // 2)


# fmt: off
@dataclass(frozen=True)
class StackOptions(ModelFlags):
    """What to start. `model` None is the bundled pair; `draft_model` "" is prompt lookup only.

    Ports of 0 are picked. Only the orchestrator listens on `host` and, for its operator,
    `admin_host`, the others on loopback. `threads` are those of all ranks of the target together; 0
    leaves it to the service, with half of the cores for torch. A `draft_device` of None is
    `device`. `orchestrator_flags`, and the `service_flags` of draft and verify service, are passed
    on as they are.
    """

    drafter: Annotated[str, setting(DraftSettings, "drafter")] = ""
    rule: Annotated[str, _orchestrator("rule")] = "fly"
    num_speculative_tokens: Annotated[SpeculationLength, _orchestrator(
        "num_speculative_tokens", read=read_speculation_length,
    )] = AUTO
    max_sessions: Annotated[int, setting(VerifySettings, "max_sessions")] = 32
    host: Annotated[str, _orchestrator(
        "host", group=_PORTS, help="Address to listen on; draft and verify stay on loopback.",
    )] = LOOPBACK
    admin_host: Annotated[str, _orchestrator("admin_host", group=_PORTS)] = LOOPBACK
    port: Annotated[int, _orchestrator("port", group=_PORTS)] = 0
    admin_port: Annotated[int, _orchestrator("admin_port", group=_PORTS)] = 0
    draft_port: Annotated[int, _port("Draft service's port; 0 picks one.")] = 0
    verify_port: Annotated[int, _port("Verify service's port; 0 picks one.")] = 0
    log_level: Annotated[LogLevel, _orchestrator("log_level")] = "info"
    # fmt: on
    drain_grace_s: float = 10.0
    orchestrator_flags: tuple[str, ...] = ()
    service_flags: tuple[str, ...] = ()
    start_timeout_s: float = 1800.0

    def resolved(self) -> StackOptions:
        """The same with models, devices and threads filled in."""
        changes: dict[str, Any] = {}
        if self.model is None:
            target, draft = DEMO_MODELS / "target", DEMO_MODELS / "draft"
            if not (target / "model.safetensors").is_file():
                raise ConfigError(
                    f"no --model given, and the bundled pair is not in {DEMO_MODELS}; "
                    "pass --model DIR and --draft-model DIR"
                )
            changes["model"] = str(target)
            if self.draft_model is None:
                changes["draft_model"] = str(draft)
        elif self.draft_model is None:
            changes["draft_model"] = ""
        if self.draft_device is None:
            changes["draft_device"] = self.device
        if changes.get("draft_model", self.draft_model):
            changes |= self.gpu_shares()
        if self.rules_file:
            changes["rules_file"] = str(Path(self.rules_file).expanduser().resolve())
        return replace(self, **changes)

    def flags(self, *names: str) -> list[str]:
        """These fields as a service takes them, without the prefix that tells services apart."""
        values = {n.removeprefix("draft_").removeprefix("verify_"): getattr(self, n) for n in names}
        return to_flags(**values)


class Stack:
    """Draft, verify and orchestrator services. `async with Stack(options) as stack: ...`."""

    def __init__(
        self,
        options: StackOptions | None = None,
        on_event: Callable[[str], None] = _ignore,
        on_log: Callable[[str], None] = _ignore,
    ) -> None:
        self.options = (options or StackOptions()).resolved()
        self.services: dict[str, Child] = {}
        self._on_event = on_event
        self._on_log = on_log

    # --- where things are -------------------------------------------------------------------

    def _address_of(self, name: str, port: str = "port", host: str = LOOPBACK) -> str:
        reachable = LOOPBACK if host in ("0.0.0.0", "") else "::1" if host == "::" else host
        bracketed = f"[{reachable}]" if ":" in reachable else reachable
        return f"{bracketed}:{self.services[name].facts[port]}"

    @property
    def address(self) -> str:
        """Where clients generate."""
        return self._address_of("orchestrator", host=self.options.host)

    @property
    def admin_address(self) -> str:
        """Where the operator asks."""
        return self._address_of("orchestrator", "admin_port", self.options.admin_host)

    @property
    def draft_address(self) -> str:
        """The draft service."""
        return self._address_of("draft")

    @property
    def verify_address(self) -> str:
        """The verify service."""
        return self._address_of("verify")

    # --- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.stop(0.0)
            raise ServiceDiedError(
                f"the stack was not ready after {self.options.start_timeout_s:.0f} s"
            ) from None
        except BaseException:
            await self.stop(0.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a service dies, and raise why."""
        waits = {asyncio.ensure_future(s.process.wait()): s for s in self.services.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        raise await waits[done.pop()].failure()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; if a service dies meanwhile, cancel it and raise why the service died."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is None:
                return task.result()
            if not watch.done():  # the call may fail a moment before its service is gone
                await asyncio.wait([watch], timeout=0.2)
            return await (watch if watch.done() else task)  # type: ignore[return-value]
        finally:
            for pending in (task, watch):
                pending.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def stop(self, grace_s: float | None = None) -> None:
        """End all services: the orchestrator drains first; what is left after it is killed."""
        grace = self.options.drain_grace_s if grace_s is None else grace_s
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

    def _check_ports(self) -> None:
        """Find a port in use now, not when a large model has been loaded."""
        o = self.options
        for flag, host, port in (
            ("--port", o.host, o.port),
            ("--admin-port", o.admin_host, o.admin_port),
            ("--draft-port", LOOPBACK, o.draft_port),
            ("--verify-port", LOOPBACK, o.verify_port),
        ):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except (OSError, OverflowError) as error:
                    raise ConfigError(
                        f"{flag} {port}: cannot listen on {host}: "
                        f"{getattr(error, 'strerror', None) or error}; stop the other process or "
                        "choose another port (0 picks a free one)"
                    ) from None

    def _check_rules(self) -> None:
        """Find a rule or a rules file that cannot work now, not when a model has been loaded."""
        from orchestrator.generation.rule_files import load_rules

        o = self.options
        load_rules(o.rules_file or "", o.rule, o.num_speculative_tokens)

    def _check_security(self) -> None:
        """Find certificates or keys that cannot work now, and ports that are open by oversight."""
        from flyspec.security import ApiKeys

        o = self.options
        flags = ["--host", o.host, "--admin-host", o.admin_host, *o.orchestrator_flags]
        settings = from_command_line(OrchestratorSettings, "orchestrator", flags)
        settings.port_security.credentials()
        settings.admin_security.credentials()
        if settings.api_keys_file:
            ApiKeys(settings.api_keys_file)

    def _services_speak_tls(self) -> bool:
        """Whether draft and verify service have certificates, by flags or by environment."""
        flags = ["--model", str(self.options.model), *self.options.service_flags]
        return bool(from_command_line(VerifySettings, "verify", flags).ssl_certfile)

    async def _start(self) -> None:
        self._check_security()
        self._check_ports()
        self._check_rules()
        o = self.options
        common = o.flags("log_level", "drain_grace_s")
        limits = [*common, "--host", LOOPBACK, *o.flags("max_sessions", "max_model_len"),
                  *o.service_flags]  # fmt: skip
        verify = o.flags("model", "verify_port", "device", "dtype", "threads",
                         "tensor_parallel_size", "batch_invariant", "gpu_memory_utilization",
                         "kv_cache_memory_bytes")  # fmt: skip
        draft = o.flags("draft_model", "draft_port", "draft_device", "draft_dtype",
                        "draft_threads", "drafter", "draft_gpu_memory_utilization",
                        "draft_kv_cache_memory_bytes")  # fmt: skip
        self._on_event(f"loading the target {o.model}")
        self._on_event(f"loading the draft model {o.draft_model}" if o.draft_model
                       else "drafting by prompt lookup, without a model")  # fmt: skip
        first = [
            await self._spawn("verify", "verify_service", [*limits, *verify], o.threads),
            await self._spawn("draft", "draft_service", [*limits, *draft], o.draft_threads),
        ]
        await _all_or_first_error([self._ready(service) for service in first])
        orchestrator = [*common, *o.flags("host", "port", "admin_host", "admin_port", "rule",
                                          "num_speculative_tokens", "rules_file"),
                        "--verify-address", self.verify_address,
                        "--draft-address", self.draft_address]  # fmt: skip
        if not self._services_speak_tls():  # they listen on loopback in the clear
            orchestrator += ["--upstream-tls", "false"]
        orchestrator += o.orchestrator_flags
        self._on_event("starting the orchestrator")
        last = await self._spawn("orchestrator", "orchestrator", orchestrator, 1)
        await self.guard(self._ready(last))

    async def _spawn(self, name: str, module: str, flags: list[str], threads: int) -> Child:
        service = await Child.start(name, module, flags, threads or torch_threads(), self._on_log)
        self.services[name] = service
        return service

    async def _ready(self, service: Child) -> None:
        await service.ready()
        self._on_event(f"the {service.name} service is ready")


async def _all_or_first_error(work: list[Coroutine[Any, Any, None]]) -> None:
    """Do all at once; the first error cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
