"""Assembles the HTTP face: application, gate, server."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from flyspec.config import HTTP_PORT, OrchestratorSettings
from flyspec.rule_files import RuleBook
from flyspec.security import ApiKeys, Scope
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.access import KeyCheck
from orchestrator.front.http.app import make_app, paths_of
from orchestrator.front.http.gate import HttpGate, HttpMetrics, Limits
from orchestrator.front.http.origins import Origins
from orchestrator.front.http.server import HttpServer
from orchestrator.generations import Generations


def make_server(
    generations: Generations,
    fleet: Fleet,
    settings: OrchestratorSettings,
    rules: RuleBook,
    keys: ApiKeys | None,
    max_body_bytes: int,
    registry: CollectorRegistry,
) -> HttpServer:
    """Return a server, not listening yet, with access as on the generation port.

    A port that was not chosen explicitly gives way to a free one.
    """
    security = settings.port_security
    app = make_app(generations, fleet, settings, rules)
    gate = HttpGate(
        app,
        security,
        Origins(settings),
        KeyCheck(keys, Scope.GENERATE) if security.keys and keys is not None else None,
        Limits(max_body_bytes, settings.write_timeout_s),
        HttpMetrics(registry, paths_of(app)),
        lambda caller: generations.arrive(caller),
    )
    served: Any = gate
    if settings.origins:  # outside the gate, since browsers ask without a key whether they may call
        served = CORSMiddleware(
            served, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    port = settings.http_port
    if port is not None:
        return HttpServer(served, [port], security, gate.cut)
    return HttpServer(served, [HTTP_PORT, 0] if settings.port else [0], security, gate.cut)
