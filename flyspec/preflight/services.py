"""Checks of a service's settings before it imports torch or connects to others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flyspec.config import (
    NO_PORT,
    DraftSettings,
    ModelServerSettings,
    OrchestratorSettings,
    VerifySettings,
)
from flyspec.datastore.store import DatastoreFacts
from flyspec.downloads import download
from flyspec.drafter_names import check_needs, head_directories
from flyspec.engine.heads import layer_heads
from flyspec.engine.native.family import FAMILIES
from flyspec.engine.supported import check_heads, check_length, kind_of, unserved
from flyspec.errors import ConfigError
from flyspec.hub import hub_file
from flyspec.model_files import check_model_files, is_gguf
from flyspec.preflight.cuda import check_device, check_torch
from flyspec.preflight.gguf import check_llama_cpp, serves_gguf
from flyspec.preflight.ports import check_port
from flyspec.security import ApiKeys

_RANK = "RANK"
"""torchrun's variable; ranks above 0 do not listen."""


def check_verify(settings: VerifySettings) -> None:
    """Check a verify service's settings and its model's files, downloaded if need be."""
    check_torch(f"--model {settings.model}")
    _check_port(settings, listens=os.environ.get(_RANK, "0") == "0")
    _check_heads(settings.heads)
    _download(settings.model)
    if serves_gguf(settings):
        return
    if (file := settings.autojudge_file) and not Path(file).expanduser().is_file():
        raise ConfigError(
            f"--autojudge-file {file}: no such file; make one with `flyspec autojudge train`"
        )
    text = _check_model(settings, settings.model)
    if text is None:
        return
    check_length(settings.max_model_len, _context_length(text))
    if settings.tensor_parallel_size > 1 and _has_heads(text):
        layers = layer_heads(SimpleNamespace(**{"num_hidden_layers": 1, **text}))
        heads = {(heads, kv_heads) for heads, kv_heads, _ in layers}
        check_heads(settings.model, heads, settings.tensor_parallel_size)


def check_draft(settings: DraftSettings) -> None:
    """Check a draft service's settings, and its model's files, downloaded if need be."""
    _check_port(settings)
    check_needs(settings.drafter, bool(settings.model), bool(settings.datastore))
    if settings.datastore:
        DatastoreFacts.load(Path(settings.datastore))
    if not settings.model:
        return
    check_torch(f"--model {settings.model}")
    _download(settings.model)
    if not serves_gguf(settings):
        _check_model(settings, settings.model)


def check_orchestrator(settings: OrchestratorSettings) -> None:
    """Check the orchestrator's ports, certificates and keys; it checks the rest itself at once."""
    _check_port(settings)
    settings.admin_security.credentials()
    if settings.api_keys_file:
        ApiKeys(settings.api_keys_file)
    check_port("--admin-port", settings.admin_host or settings.host, settings.admin_port)
    if settings.http_port not in (None, NO_PORT):
        check_port("--http-port", settings.host, settings.http_port)


def _check_heads(setting: str) -> None:
    for name, path in head_directories(setting).items():
        if is_gguf(path):
            check_llama_cpp(f"--heads {name}={path}")
        elif not Path(path).expanduser().is_dir():
            raise ConfigError(
                f"--heads {name}={path}: no such directory; make a head with "
                "`flyspec heads train`, or download one"
            )


def _check_port(settings: Any, listens: bool = True) -> None:
    settings.port_security.credentials()
    if listens:
        check_port("--port", settings.host, settings.port)
        if settings.metrics_port not in (None, NO_PORT):
            check_port("--metrics-port", settings.host, settings.metrics_port)


def _check_model(settings: ModelServerSettings, name: str) -> Mapping[str, Any] | None:
    """Check device and files; return the configuration of the text model, if it is here."""
    check_device(settings.device)
    config = check_model_files(name)
    if config is None:
        return None
    if kind := kind_of(config):
        raise unserved(name, f"it is {kind}")
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _download(name: str) -> None:
    if hub_file(name):
        check_llama_cpp(f"--model {name}")
    download(name)


def _has_heads(text: Mapping[str, Any]) -> bool:
    """True if ranks certainly split the heads that a configuration names."""
    return text.get("model_type") in FAMILIES and "num_attention_heads" in text


def _context_length(text: Mapping[str, Any]) -> int | None:
    """The longest context in tokens that a configuration names; None if it names none."""
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None
