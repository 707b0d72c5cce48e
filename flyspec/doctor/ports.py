"""The ports of the services: free, or who has them; and what protects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flyspec.config import HTTP_PORT, NO_PORT, OrchestratorSettings, ServerSettings
from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.errors import ConfigError
from flyspec.preflight.ports import port_problem
from flyspec.security import PortSecurity
from flyspec.telemetry.service import DEFAULT_PORTS

SECTION = "ports"


class _Wanted(NamedTuple):
    """A port to listen on. One that was not chosen is replaced by another if it is taken."""

    flag: str
    host: str
    port: int
    chosen: bool = True


def ports(services: Sequence[tuple[str, ServerSettings, str]]) -> Iterator[Diagnosis]:
    """Examine the ports of services, given by name, settings and the flag of their own port."""
    for name, settings, flag in services:
        for wanted in _wanted(name, settings, flag):
            yield _examined(wanted)
        for security in _securities(settings):
            try:
                security.credentials()
            except ConfigError as error:
                yield Diagnosis(SECTION, f"{name} TLS", Mark.ERROR, str(error))


def _wanted(name: str, settings: ServerSettings, flag: str) -> Iterator[_Wanted]:
    yield _Wanted(flag, settings.host, settings.port)  # type: ignore[attr-defined]
    if isinstance(settings, OrchestratorSettings):
        admin_host = settings.admin_host or settings.host
        yield _Wanted("--admin-port", admin_host, settings.admin_port)
        if settings.http_port is not None:
            yield _Wanted("--http-port", settings.host, settings.http_port)
        elif settings.port:
            yield _Wanted("--http-port", settings.host, HTTP_PORT, chosen=False)
    if settings.metrics_port is not None:
        yield _Wanted(f"{name} metrics", settings.host, settings.metrics_port)
    elif settings.port:  # type: ignore[attr-defined]
        yield _Wanted(f"{name} metrics", settings.host, DEFAULT_PORTS[name], chosen=False)


def _securities(settings: ServerSettings) -> Iterator[PortSecurity]:
    yield settings.port_security
    if isinstance(settings, OrchestratorSettings):
        yield settings.admin_security


def _examined(wanted: _Wanted) -> Diagnosis:
    subject = wanted.flag.removeprefix("--")
    if wanted.port in (0, NO_PORT):
        text = "none (-1)" if wanted.port == NO_PORT else "a free one is picked (0)"
        return Diagnosis(SECTION, subject, Mark.OK, text)
    problem = port_problem(wanted.host, wanted.port)
    where = f"{wanted.host}:{wanted.port}"
    facts = {"host": wanted.host, "port": wanted.port, "free": not problem}
    if not problem:
        return Diagnosis(SECTION, subject, Mark.OK, f"{where} is free", facts)
    if not wanted.chosen:
        text = f"{where}: {problem}; another port will be used"
        return Diagnosis(SECTION, subject, Mark.WARNING, text, facts)
    flag = wanted.flag if wanted.flag.startswith("--") else "--metrics-port"
    text = f"{where}: {problem}; stop the other process, or choose another port with {flag}"
    return Diagnosis(SECTION, subject, Mark.ERROR, text, facts)
