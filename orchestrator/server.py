"""Assembles the orchestrator: upstreams, admission, two ports, draining."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flyspec import rpc, serving
from flyspec.config import NO_PORT, OrchestratorSettings
from flyspec.errors import ConfigError
from flyspec.rule_files import load_rules
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.security import ApiKeys, PortSecurity, Scope
from flyspec.speculation_length import REQUESTED_BY_AUTO, excess
from flyspec.spelling import install_command
from flyspec.startup import stage
from flyspec.telemetry import Telemetry
from flyspec.v1 import admin_pb2_grpc, generation_pb2_grpc
from orchestrator.admission.admission import Admission
from orchestrator.exact_twins import ExactTwins
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target import Target
from orchestrator.front.access import KeyCheck, audit
from orchestrator.front.admin import AdminServicer
from orchestrator.front.grpc import Arrivals, GenerationServicer
from orchestrator.generations import Generations
from orchestrator.telemetry.requests import RequestObserver
from orchestrator.telemetry.state_metrics import admission_metrics, fleet_metrics
from orchestrator.upstreams.connector import GrpcConnector

if TYPE_CHECKING:
    from orchestrator.front.http.server import HttpServer

log = logging.getLogger(__name__)

GENERATION_SERVICE = "flyspec.v1.GenerationService"
ADMIN_SERVICE = "flyspec.v1.AdminService"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from <malloc.h>
LARGE_BYTES = 128 << 10
MAX_HEAPS = 2


class Orchestrator:
    """The orchestrator: upstreams, admission, and one port each for clients and operators."""

    lost = None

    def __init__(self, settings: OrchestratorSettings, telemetry: Telemetry | None = None) -> None:
        self._settings = settings
        self._telemetry = telemetry or Telemetry("orchestrator", settings)
        self._credentials = settings.port_security.credentials()
        self._admin_credentials = settings.admin_security.credentials()
        self._keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file else None
        self._rules = load_rules(
            settings.rules_file, settings.rule, settings.num_speculative_tokens
        )
        self.fleet = Fleet(settings, GrpcConnector(settings))
        self._servers: list[rpc.GrpcServer] = []
        self._admission: Admission | None = None
        self._twins: ExactTwins | None = None
        self._http: HttpServer | None = None

    async def start(self) -> dict[str, int]:
        """Connect to the services, then listen; return the ports. Raises `FlyspecError`."""
        settings, fleet = self._settings, self.fleet
        stage("connecting to the services")
        await fleet.connect()
        fleet.on_target(self._check_target)
        if problem := excess(settings.num_speculative_tokens, fleet.max_draft_tokens):
            raise ConfigError(f"{problem}, or raise their --max-speculative-tokens")
        admission = Admission(settings, lambda: fleet.max_sessions, lambda: fleet.others)
        self._admission = admission
        self._telemetry.collect(lambda: admission_metrics(admission))
        self._telemetry.collect(lambda: fleet_metrics(fleet))
        observer = RequestObserver(self._telemetry)
        self._twins = ExactTwins(fleet, admission, settings, self._telemetry.registry)
        generations = Generations(fleet, admission, settings, self._rules, observer, self._twins)
        generation = GenerationServicer(generations, settings.write_timeout_s)
        clients = rpc.GrpcServer(
            settings.host,
            settings.port,
            [(generation_pb2_grpc.add_GenerationServiceServicer_to_server, generation)],
            [GENERATION_SERVICE],
            max_request_bytes=rpc.max_request_bytes(fleet.target.info.model.context_length),
            credentials=self._credentials,
            interceptors=self._telemetry.interceptors(make_ids=True),
            checks=[*self._checks(settings.port_security, Scope.GENERATE), Arrivals(generations)],
        )
        self._http = self._http_face(
            generations, rpc.max_request_bytes(fleet.target.info.model.context_length)
        )
        admin = AdminServicer(fleet, admission, [clients])
        operators = rpc.GrpcServer(
            settings.admin_host or settings.host,
            settings.admin_port,
            [(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin)],
            [ADMIN_SERVICE],
            max_request_bytes=rpc.max_request_bytes(0),
            credentials=self._admin_credentials,
            interceptors=self._telemetry.interceptors(make_ids=True),
            checks=[*self._checks(settings.admin_security, Scope.ADMIN), audit],
        )
        self._servers = [clients, operators]
        for server in self._servers:
            await server.start()
        ports = {"port": clients.port, "admin_port": operators.port}
        clients.neighbours[ADMIN_SERVICE] = operators.port
        operators.neighbours[GENERATION_SERVICE] = clients.port
        if self._http is not None:
            ports["http_port"] = await self._http.start()
        for server in self._servers:
            await server.set_ready(True)
        return ports

    def _check_target(self, target: Target) -> None:
        """Raise `ConfigError` if the settings do not suit a target."""
        self._rules.check_vocabulary(target.info.model.vocab_size)
        rule = self._rules.resolve(Rule(self._settings.rule), REQUESTED_BY_AUTO)
        if RULE_PRESETS[rule.name].hidden_layers and self.fleet.offer(target).judge is None:
            raise ConfigError(
                f"--rule {self._settings.rule}: the target {target.info.model.name} has no judge; "
                "start its verify service with --autojudge-file, or set another rule"
            )

    def _http_face(self, generations: Generations, max_body_bytes: int) -> HttpServer | None:
        """Return the server of the HTTP API; None if there is to be none. Raises `ConfigError`."""
        settings, port = self._settings, self._settings.http_port
        if port == NO_PORT:
            return None
        if port is None and not all(map(find_spec, ("fastapi", "httptools", "uvicorn"))):
            log.info("no HTTP API; to have it, %s", install_command("http"))
            return None
        try:
            from orchestrator.front.http.server import make_server  # takes half a second
        except ImportError as error:
            raise ConfigError(
                f"--http-port {port}: needs {error.name}; {install_command('http')}, or set -1 for "
                "no HTTP API"
            ) from None
        registry = self._telemetry.registry
        return make_server(
            generations, self.fleet, settings, self._rules, self._keys, max_body_bytes, registry
        )

    def _checks(self, security: PortSecurity, scope: Scope) -> list[rpc.Check]:
        checks = rpc.checks_of(security)
        if security.keys and self._keys is not None:
            checks.append(KeyCheck(self._keys, scope))
        return checks

    @property
    def missing(self) -> dict[str, str]:
        """Drafters that are not there, and why; generations do without them until they are."""
        return self.fleet.missing

    @property
    def ports(self) -> tuple[int, int]:
        generation, admin = self._servers
        return generation.port, admin.port

    async def stop(self, grace_s: float) -> None:
        """Refuse waiting requests, give running ones `grace_s` seconds to finish, then stop."""
        if self._admission is not None:
            self._admission.drain()
        stopping = [server.stop(grace_s) for server in self._servers]
        if self._http is not None:
            stopping.append(self._http.stop(grace_s))
        await asyncio.gather(*stopping)
        if self._twins is not None:
            await self._twins.close()
        await self.fleet.close()


async def serve(settings: OrchestratorSettings) -> None:
    """Serve until SIGTERM, then drain. Raises `FlyspecError` if it cannot start."""

    async def load(telemetry: Telemetry) -> Orchestrator:
        return Orchestrator(settings, telemetry)

    return_large_blocks()
    await serving.serve("orchestrator", settings, load)


def return_large_blocks() -> None:
    """Make the C heap return the memory of large requests to the system, if libc is glibc.

    glibc raises its mmap threshold to the largest block freed so far, and keeps a heap per thread,
    so after some requests of megabytes, pieces of them stay in every heap. After thousands of such
    requests and nothing else, 185 to 290 MiB were resident; with these settings, 140 to 215 MiB.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)
    mallopt(_M_ARENA_MAX, MAX_HEAPS)
