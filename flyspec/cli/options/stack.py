"""Flags of commands that start a stack on this machine, and of who may connect to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec.config import OrchestratorSettings, ServerSettings, VerifySettings
from flyspec.flags import ClientAuth, Dtype, Flag, flags_of

_GROUP = "Of a stack started on this machine"
_stack = partial(Flag, group=_GROUP)
_ALL = "every core for the native step, half of them for torch"


def setting(settings: type[ServerSettings], name: str, **known: Any) -> Flag:
    """A flag that is a service's setting, as that is declared."""
    field = settings.model_fields[name]
    help_ = field.description or ""
    least = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    return Flag(**{"help": help_[:1].upper() + help_[1:] + ".", "min": least, **known})


_verify = partial(setting, VerifySettings, group=_GROUP)
_security = partial(setting, OrchestratorSettings, group="Who may connect")


def to_flags(**values: Any) -> list[str]:
    """As they are typed; None is left out, a path is absolute."""
    flags = []
    for name, value in values.items():
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if value and name.endswith(("file", "certs")):
                shown = str(Path(value).expanduser().resolve())
            flags += ["--" + name.replace("_", "-"), shown]
    return flags


# fmt: off
@dataclass(frozen=True)
class ModelFlags:
    """Which models to start, on what, and with which rules."""

    model: Annotated[str | None, _stack(
        "Target model: a directory or hub id; the bundled pair if not given.",
    )] = None
    draft_model: Annotated[str | None, _stack(
        "Draft model: a directory or hub id; '' drafts by prompt lookup only.",
    )] = None
    device: Annotated[str, _stack("Device of the target: cpu, cuda, cuda:N or auto.")] = "auto"
    draft_device: Annotated[str | None, _stack(
        "Device of the draft model.", default="as --device",
    )] = None
    dtype: Annotated[Dtype, _stack("Data type of the target's weights.")] = "auto"
    draft_dtype: Annotated[Dtype, _stack("Data type of the draft model's weights.")] = "auto"
    threads: Annotated[int, _stack("CPU threads of the target.", min=0, default=_ALL)] = 0
    draft_threads: Annotated[int, _stack(
        "CPU threads of the draft model.", min=0, default=_ALL,
    )] = 0
    batch_invariant: Annotated[bool | None, _verify("batch_invariant")] = None
    tensor_parallel_size: Annotated[int, _verify("tensor_parallel_size")] = 1
    rules_file: Annotated[str | None, setting(
        OrchestratorSettings, "rules_file", group=_GROUP,
    )] = None

    def given(self) -> list[str]:
        """The flags that differ from their defaults, as they are typed."""
        return [
            flags_of(ModelFlags)[f.name][1].typed(f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]


@dataclass(frozen=True)
class ListeningFlags:
    """What the orchestrator, which alone may listen beyond loopback, is told of security."""

    ssl_certfile: Annotated[str, _security("ssl_certfile")] = ""
    ssl_keyfile: Annotated[str, _security("ssl_keyfile")] = ""
    ssl_ca_certs: Annotated[str, _security("ssl_ca_certs")] = ""
    ssl_client_auth: Annotated[ClientAuth | None, _security("ssl_client_auth")] = None
    admin_ssl_client_auth: Annotated[ClientAuth | None, _security("admin_ssl_client_auth")] = None
    api_keys_file: Annotated[str, _security("api_keys_file")] = ""
    allow_insecure: Annotated[bool, _security("allow_insecure")] = False
    # fmt: on

    def orchestrator_flags(self) -> tuple[str, ...]:
        """As the orchestrator takes them."""
        given = {name: value for name, value in vars(self).items() if value}
        bare = ["--allow-insecure"] if given.pop("allow_insecure", False) else []
        return (*to_flags(**given), *bare)
