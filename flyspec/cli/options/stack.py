"""Flags of commands that start a stack on this machine, and its security flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flyspec.addresses import address_problem
from flyspec.config import (
    ADMIN_PORT,
    GENERATION_PORT,
    DraftSettings,
    OrchestratorSettings,
    ServerSettings,
    VerifySettings,
)
from flyspec.flags import (
    AttentionBackendName,
    ClientAuth,
    Dtype,
    EngineName,
    Flag,
    FlashAttention,
    flags_of,
)

_GROUP = "Stack started by this command"
_stack = partial(Flag, group=_GROUP)
_ALL = "all cores with the native step, half of them with torch"


def setting(settings: type[ServerSettings], name: str, **known: Any) -> Flag:
    """Return the flag for a service's setting, with the setting's own description."""
    field = settings.model_fields[name]
    help_ = field.description or ""
    least = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    return Flag(**{"help": help_[:1].upper() + help_[1:] + ".", "min": least, **known})


_verify = partial(setting, VerifySettings, group=_GROUP)
_security = partial(setting, OrchestratorSettings, group="Security")
_SHARES = {"gpu_memory_utilization": 0.7, "draft_gpu_memory_utilization": 0.2}
"""Shares of a GPU used by both models: a draft model is smaller and caches less per token."""


def _utilization(name: str, **known: Any) -> Flag:
    """Return `--gpu-memory-utilization` for one of the two models."""
    alone = VerifySettings.model_fields["gpu_memory_utilization"].default
    shown = f"{alone:g}; {_SHARES[name]:g} if target and draft model share a GPU"
    return _verify("gpu_memory_utilization", default=shown, **known)


def read_address(text: str, kind: str = "generation", default_port: int = GENERATION_PORT) -> str:
    """Check an `--address`. Raises `ValueError`."""
    if problem := address_problem(text, kind, default_port):
        raise ValueError(f"{text}: {problem}")
    return text


read_admin_address = partial(read_address, kind="admin", default_port=ADMIN_PORT)


def to_flags(settings: type[ServerSettings], values: Mapping[str, Any]) -> list[str]:
    """Return a service's flags as typed, without those that are None and with absolute paths."""
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if settings.model_fields[name].annotation is bool:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if value and name.endswith(("file", "certs", "datastore")):
            shown = str(Path(value).expanduser().resolve())
        flags += [f"--{flag}", shown]
    return flags


# fmt: off
@dataclass(frozen=True)
class ModelFlags:
    """The models of a stack to start, with their devices, memory and rules."""

    model: Annotated[str | None, _stack(
        "Target model: a directory, a GGUF file, or on a hub REPO or REPO:FILE.gguf (default: the "
        "bundled pair of 12 M parameters, for word problems only). With bench --address: the "
        "target's files on this machine, if not found by name.",
    )] = None
    draft_model: Annotated[str | None, _stack(
        "Draft model: likewise; '' (the default with --model): prompt lookup only.",
    )] = None
    engine: Annotated[EngineName, _verify("engine")] = "auto"
    draft_engine: Annotated[EngineName, _verify(
        "engine", help="--engine for the draft model.",
    )] = "auto"
    n_gpu_layers: Annotated[int | None, _verify(
        "n_gpu_layers", default="all; none with --device cpu",
        help="Layers of a GGUF target that llama.cpp keeps on GPUs (-1: all).",
    )] = None
    draft_n_gpu_layers: Annotated[int | None, _verify(
        "n_gpu_layers", default="all; none with --draft-device cpu",
        help="--n-gpu-layers for the draft model.",
    )] = None
    flash_attn: Annotated[FlashAttention | None, _verify("flash_attn", default="auto")] = None
    device: Annotated[str, _stack("Device of the target: cpu, cuda, cuda:N or auto.")] = "auto"
    draft_device: Annotated[str | None, _stack(
        "Device of the draft model.", default="same as --device",
    )] = None
    dtype: Annotated[Dtype, _stack("Data type of the target's weights.")] = "auto"
    draft_dtype: Annotated[Dtype, _stack("Data type of the draft model's weights.")] = "auto"
    threads: Annotated[int, _stack("CPU threads of the target.", min=0, default=_ALL)] = 0
    draft_threads: Annotated[int, _stack(
        "CPU threads of the draft model.", min=0, default=_ALL,
    )] = 0
    max_model_len: Annotated[int | None, _verify(
        "max_model_len", default="the target's own limit",
        help="Maximum sequence length in tokens; the draft model's own limit may be lower.",
    )] = None
    gpu_memory_utilization: Annotated[float | None, _utilization("gpu_memory_utilization")] = None
    draft_gpu_memory_utilization: Annotated[float | None, _utilization(
        "draft_gpu_memory_utilization", help="--gpu-memory-utilization for the draft model.",
    )] = None
    kv_cache_memory_bytes: Annotated[int | None, _verify(
        "kv_cache_memory_bytes", default="0",
    )] = None
    draft_kv_cache_memory_bytes: Annotated[int | None, _verify(
        "kv_cache_memory_bytes", default="0", help="--kv-cache-memory-bytes for the draft model.",
    )] = None
    block_size: Annotated[int | None, _verify(
        "block_size", default="32 on a GPU, 0 on a CPU",
        help="Tokens per block of both models' KV cache: 16 to 256, or 0 for contiguous slots.",
    )] = None
    attention_backend: Annotated[AttentionBackendName | None, _verify(
        "attention_backend", default="auto",
    )] = None
    enforce_eager: Annotated[bool | None, _verify("enforce_eager", default="no")] = None
    batch_invariant: Annotated[bool | None, _verify("batch_invariant")] = None
    tensor_parallel_size: Annotated[int, _verify("tensor_parallel_size")] = 1
    autojudge_file: Annotated[str | None, _verify(
        "autojudge_file", default="with the bundled pair, the one that comes with it",
    )] = None
    datastore: Annotated[str | None, setting(
        DraftSettings, "datastore", group=_GROUP, default="none",
    )] = None
    heads: Annotated[str | None, _verify(
        "heads", default="with the bundled pair, the one that comes with it",
    )] = None
    rules_file: Annotated[str | None, setting(
        OrchestratorSettings, "rules_file", group=_GROUP,
    )] = None

    def gpu_shares(self) -> dict[str, float]:
        """Return the default memory shares if both models would use the same GPU."""
        target, draft = self.device, self.draft_device or self.device
        if "cpu" in (target, draft):
            return {}
        first, own = (int("0" + "".join(filter(str.isdigit, d))) for d in (target, draft))
        if not first <= own < first + self.tensor_parallel_size:
            return {}
        return {name: share for name, share in _SHARES.items() if getattr(self, name) is None}

    def given(self) -> list[str]:
        """Return the flags that differ from their defaults, as typed."""
        return [
            flags_of(ModelFlags)[f.name][1].typed(f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]


@dataclass(frozen=True)
class ListeningFlags:
    """Security of the orchestrator, the only service that may listen beyond loopback."""

    ssl_certfile: Annotated[str, _security("ssl_certfile")] = ""
    ssl_keyfile: Annotated[str, _security("ssl_keyfile")] = ""
    ssl_ca_certs: Annotated[str, _security("ssl_ca_certs")] = ""
    ssl_client_auth: Annotated[ClientAuth | None, _security("ssl_client_auth")] = None
    admin_ssl_client_auth: Annotated[ClientAuth | None, _security("admin_ssl_client_auth")] = None
    api_keys_file: Annotated[str, _security("api_keys_file")] = ""
    http_allowed_origins: Annotated[str, _security("http_allowed_origins")] = ""
    allowed_hosts: Annotated[str, _security("allowed_hosts")] = ""
    allow_special_tokens: Annotated[bool, _security("allow_special_tokens")] = False
    allow_insecure: Annotated[bool, _security("allow_insecure")] = False
    # fmt: on

    def orchestrator_flags(self) -> tuple[str, ...]:
        given = {name: value for name, value in vars(self).items() if value}
        return tuple(to_flags(OrchestratorSettings, given))
