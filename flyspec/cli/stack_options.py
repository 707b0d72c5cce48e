"""Options of a stack, the addresses of its services and their flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec import bundled
from flyspec.cli.options.stack import ModelFlags, setting, to_flags
from flyspec.config import (
    NO_PORT,
    DraftSettings,
    OrchestratorSettings,
    ServerSettings,
    VerifySettings,
)
from flyspec.drafter_names import RELAY
from flyspec.errors import ConfigError
from flyspec.flags import Flag, LogLevel
from flyspec.rules.presets import DEFAULT_RULE
from flyspec.settings_sources import from_command_line
from flyspec.speculation_length import AUTO, SpeculationLength, read_speculation_length

LOOPBACK = "127.0.0.1"
PORTS = {
    "verify": {"verify_port": "port"},
    "draft": {"draft_port": "port"},
    "orchestrator": {"port": "port", "admin_port": "admin_port", "http_port": "http_port"},
}
"""Port options by service, with the names under which it announces them when ready."""
HEAD_DRAFTERS = (bundled.EAGLE3.name, RELAY) if bundled.EAGLE3.is_dir() else ()
"""Drafters that a stack of the bundled models has because of the head among them."""
SETTINGS: Mapping[str, type[ServerSettings]] = {
    "verify": VerifySettings,
    "draft": DraftSettings,
    "orchestrator": OrchestratorSettings,
}
_LISTENING = "Where to listen"
_port = partial(Flag, min=0, group=_LISTENING)
_orchestrator = partial(setting, OrchestratorSettings)


# fmt: off
@dataclass(frozen=True)
class StackOptions(ModelFlags):
    """Services to start. `model` None is the bundled pair; `draft_model` "" is prompt lookup only.

    For ports of 0, free ones are picked. Only the orchestrator listens on `host` and, for its
    operator, `admin_host`; the others listen on loopback. `threads` is the total over all ranks of
    the target; 0 leaves it to the service, with half of the cores for torch. A `draft_device` of
    None means `device`. `orchestrator_flags`, and `service_flags` (for draft and verify service),
    are passed on unchanged. Benchmarks add flags to a service with `last_flags`, or replace it by
    another module (`modules`); the keys are draft, verify and orchestrator.
    """

    served_model_name: Annotated[str, setting(VerifySettings, "served_model_name")] = ""
    drafter: Annotated[str, setting(DraftSettings, "drafter")] = ""
    rule: Annotated[str, _orchestrator("rule")] = DEFAULT_RULE
    num_speculative_tokens: Annotated[SpeculationLength, _orchestrator(
        "num_speculative_tokens", read=read_speculation_length,
    )] = AUTO
    max_sessions: Annotated[int, setting(VerifySettings, "max_sessions")] = 32
    host: Annotated[str, _orchestrator(
        "host", group=_LISTENING, help="Address to listen on; draft and verify stay on loopback.",
    )] = LOOPBACK
    admin_host: Annotated[str, _orchestrator("admin_host", group=_LISTENING)] = LOOPBACK
    port: Annotated[int, _orchestrator("port", group=_LISTENING)] = 0
    admin_port: Annotated[int, _orchestrator("admin_port", group=_LISTENING)] = 0
    http_port: Annotated[int | None, _orchestrator("http_port", group=_LISTENING)] = NO_PORT
    draft_port: Annotated[int, _port("Draft service's port (0: pick a free one).")] = 0
    verify_port: Annotated[int, _port("Verify service's port (0: pick a free one).")] = 0
    log_level: Annotated[LogLevel, _orchestrator("log_level")] = "info"
    # fmt: on
    drain_grace_s: float = 10.0
    orchestrator_flags: tuple[str, ...] = ()
    service_flags: tuple[str, ...] = ()
    last_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 1800.0

    def resolved(self) -> StackOptions:
        """Return a copy with models, devices and memory shares filled in."""
        changes: dict[str, Any] = {}
        if self.model is None:
            if not (bundled.TARGET / "model.safetensors").is_file():
                raise ConfigError(
                    f"no --model given, and no bundled models in {bundled.MODELS}; "
                    "pass --model DIR and --draft-model DIR"
                )
            changes["model"] = str(bundled.TARGET)
            if self.draft_model is None:
                changes["draft_model"] = str(bundled.DRAFT)
            if self.autojudge_file is None and bundled.AUTOJUDGE.is_file():
                changes["autojudge_file"] = str(bundled.AUTOJUDGE)
            if self.heads is None and bundled.EAGLE3.is_dir():
                changes["heads"] = f"{bundled.EAGLE3.name}={bundled.EAGLE3}"
        elif self.draft_model is None:
            changes["draft_model"] = ""
        if self.draft_device is None:
            changes["draft_device"] = self.device
        if changes.get("draft_model", self.draft_model):
            changes |= self.gpu_shares()
        if self.rules_file:
            changes["rules_file"] = str(Path(self.rules_file).expanduser().resolve())
        return replace(self, **changes)

    @property
    def address(self) -> str:
        return address_of(self.host, self.port)

    @property
    def admin_address(self) -> str:
        return address_of(self.admin_host, self.admin_port)

    @property
    def http_url(self) -> str | None:
        """Base URL of the HTTP API; None without one."""
        port = self.http_port
        if port in (None, NO_PORT):
            return None
        flags = from_command_line(OrchestratorSettings, "", self.orchestrator_flags)
        scheme = "https" if flags.ssl_certfile else "http"
        return f"{scheme}://{address_of(self.host, port)}"

    @property
    def draft_address(self) -> str:
        return address_of(LOOPBACK, self.draft_port)

    @property
    def verify_address(self) -> str:
        return address_of(LOOPBACK, self.verify_port)

    def flags(self, name: str) -> list[str]:
        """Return the flags with which a service is started.

        Each of its settings is the option of that name, or with the service's name before it.
        """
        others = {"verify": ("host",), "draft": ("host", "served_model_name")}.get(name, ())
        settings = SETTINGS[name]
        options = {n: f"{name}_{n}" if hasattr(self, f"{name}_{n}") else n
                   for n in settings.model_fields if n not in others}  # fmt: skip
        given = {n: getattr(self, o) for n, o in options.items() if hasattr(self, o)}
        flags = to_flags(settings, given)
        if name != "orchestrator":
            flags += ["--host", LOOPBACK, *self.service_flags]
        else:
            if not self.services_speak_tls():  # they listen on loopback without TLS
                flags += ["--upstream-tls", "false"]
            flags += self.orchestrator_flags
        return [*flags, *self.last_flags.get(name, ())]

    def services_speak_tls(self) -> bool:
        """True if draft and verify service have certificates, from flags or environment."""
        flags = ["--model", str(self.model), *self.service_flags]
        return bool(from_command_line(VerifySettings, "verify", flags).ssl_certfile)


STACK_FLAGS = {
    service: {
        f"--{name}".replace("_", "-"): f"--{service}-{name}".replace("_", "-")
        for name in settings.model_fields
        if f"{service}_{name}" in StackOptions.__dataclass_fields__
    }
    for service, settings in SETTINGS.items()
}
"""The stack's flags by a service and its own flags, if they have the service's name."""


def address_of(host: str, port: int) -> str:
    """Return the address at which this machine reaches a service listening on `host`."""
    reachable = LOOPBACK if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
