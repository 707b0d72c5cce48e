"""Which files a model is read from: safetensors alone, since reading a pickle can run code.

transformers prefers safetensors, but follows an index to whatever it names, pickles too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from flyspec.errors import ConfigError

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"


def check_files(name: str, source: str, config: Any) -> None:
    """Refuse a checkpoint that is not of safetensors throughout. Raises `ConfigError`, `OSError`.

    `source` is a directory or hub id, `name` what the user calls it.
    """
    named = getattr(config, "transformers_weights", None)
    candidates = [named] if named else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    for candidate in candidates:
        if not str(candidate).endswith((_SUFFIX, _INDEX_SUFFIX)):
            raise _unsafe(name, f"its configuration names {candidate!r}")
        found = cached_file(source, candidate, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        if str(candidate).endswith(_INDEX_SUFFIX):
            _check_index(name, Path(found))
        return
    raise _unsafe(name, f"there is no {' and no '.join(map(str, candidates))}")


def _check_index(name: str, path: Path) -> None:
    """Refuse an index that names anything but safetensors beside it."""
    try:
        files = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {path.name} cannot be read: {error!r}") from None
    for file in sorted(map(str, files)):
        if not file.endswith(_SUFFIX) or Path(file).name != file:
            raise _unsafe(name, f"{path.name} names {file!r}")


def _unsafe(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--model {name}: {reason}; weights are read from safetensors alone, since other formats "
        "can run code. Convert them with transformers' save_pretrained where you trust them"
    )


def needs_code(name: str, error: Exception) -> ConfigError | None:
    """The error for a model that brings code along, if that is what transformers complains of."""
    if "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"--model {name}: needs code that comes with it (auto_map), which is never run here; use a "
        "model of an architecture that transformers has itself"
    )
