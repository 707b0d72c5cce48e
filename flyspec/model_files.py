"""The files of a model: where `--model` finds them, and what is wrong with them. No torch.

A name is a directory, a GGUF file, or one of `flyspec.hub`, whose files may be in its cache.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flyspec.errors import ConfigError
from flyspec.hub import GGUF, cached_gguf, first_parts, hub_file, is_hub_id, is_path, snapshot

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
"""Files from which transformers makes a tokenizer; the first is best."""
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""The number of a tensor's layer, the first number in its name."""
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_TRUE = {"1", "true", "yes", "on"}
_HUB_S = 0.5
"""Seconds to wait for a hub's name or port, to say early that there is no network."""
_FORMAT = (
    "give a directory in Hugging Face format (config.json, *.safetensors, tokenizer.json) or a "
    "GGUF file"
)
_GGUF_MAGIC = b"GGUF"


def model_source(name: str) -> str:
    """Return what transformers loads for `--model NAME`: a directory, or a hub id not in the cache.

    Raises `ConfigError` for a directory without a model. Uses neither torch nor the hub, so a
    service can fail before imports that take seconds.
    """
    if not is_path(name):
        if not is_hub_id(name):
            raise ConfigError(
                f"--model {name}: no such directory{nearby(Path(name))}; {_FORMAT} or a hub id "
                "(NAME or OWNER/NAME)"
            )
        folder = snapshot(name)
        return str(folder) if folder and (folder / CONFIG).is_file() else name
    folder = Path(name).expanduser()
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--model {name}: {_no_model(folder)}")
    return str(folder)


def is_gguf(name: str) -> bool:
    """True if `--model NAME` is a GGUF file, or a directory of one instead of safetensors."""
    if hub_file(name):
        return True
    path = Path(name).expanduser()
    if path.suffix == GGUF and not path.is_dir():
        return True
    return path.is_dir() and not (path / CONFIG).is_file() and any(path.glob(f"*{GGUF}"))


def gguf_path(name: str) -> Path:
    """Return the GGUF file of `--model NAME`, of several parts the first.

    Raises `ConfigError` for one that is not there, or a directory of several models.
    """
    if wanted := hub_file(name):
        cached = cached_gguf(name, *wanted)
        if cached is None:
            raise ConfigError(f"--model {name}: is not in the cache of this machine yet")
        return cached
    path = Path(name).expanduser()
    if path.is_dir():
        found = first_parts(p.name for p in path.glob(f"*{GGUF}"))
        if len(found) != 1:
            listed = ", ".join(found)
            raise ConfigError(f"--model {name}: has {len(found)} GGUF models ({listed}); give one")
        path /= found[0]
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        near = nearby(path, files=True)
        raise ConfigError(
            f"--model {name}: {(error.strerror or str(error)).lower()}{near}"
        ) from None
    if magic != _GGUF_MAGIC:
        raise ConfigError(f"--model {name}: is not a GGUF file: it does not begin with GGUF")
    return path


def served_name(name: str) -> str:
    """Return the name of `--model NAME` for clients: its directory's or file's, or the hub id."""
    if is_gguf(name):
        return gguf_path(name).stem
    return Path(model_source(name)).resolve().name if is_path(name) else name


def _no_model(folder: Path) -> str:
    """Description of a path that is no directory with a config.json, and what to give instead."""
    if not folder.exists():
        return f"no such directory{nearby(folder)}; {_FORMAT} or a hub id"
    if folder.is_file():
        return f"is a file; {_FORMAT}"
    if (folder / ADAPTER).is_file():
        return (
            f"is an adapter of {_base_of(folder)}, not a model; merge it into its base with PEFT "
            "(merge_and_unload, then save_pretrained) and give the result"
        )
    files = sorted(file.name for file in folder.iterdir())
    inside = [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]
    inside += [path.parent for path in sorted(folder.glob(f"snapshots/*/{CONFIG}"))]
    if inside:
        return f"no {CONFIG} there; did you mean {inside[0]}?"
    if "params.json" in files:
        return f"no {CONFIG} there, but its developer's own format; {_FORMAT}"
    return f"no {CONFIG} there; {_FORMAT} or a hub id"


def _base_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another model"


def nearby(path: Path, files: bool = False) -> str:
    """A sibling of a path that does not exist, with a similar name."""
    try:
        siblings = [p.name for p in path.expanduser().parent.iterdir() if p.is_dir() or files]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, 1, 0.6)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def check_model_files(name: str) -> Mapping[str, Any] | None:
    """Check a model's files before anything large is imported; return its config.json.

    None for a hub id whose files are not on this machine yet. Raises `ConfigError`.
    """
    find = finder(name)
    path = find(CONFIG)
    if path is None:
        if find(ADAPTER):
            base = _base_of(Path(find(ADAPTER) or "").parent)
            raise ConfigError(f"--model {name}: is an adapter of {base}, not a model; merge it")
        check_reachable(name)
        return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError(
            f"--model {name}: its {CONFIG} has no model_type, so it is not a model of "
            f"transformers; {_FORMAT}"
        )
    if is_path(name):
        weights = find_weights(name, find, config.get("transformers_weights"))
        _check_shards(name, weights)
        _check_layers(name, config, weights)
        if not any(map(find, TOKENIZERS)):
            raise ConfigError(
                f"--model {name}: no tokenizer there ({', '.join(TOKENIZERS[:3])} or the like); "
                "copy tokenizer.json and tokenizer_config.json from the model it was made from"
            )
    return config


def finder(name: str) -> Callable[[str], Path | None]:
    """Return a function from the name of a model's file to its path, if it is on this machine."""
    folder = Path(model_source(name))
    return lambda file: path if (path := folder / file).is_file() else None


def check_reachable(name: str) -> None:
    """Raise `ConfigError` if a model that is not on this machine cannot be downloaded either."""
    if reason := _unreachable():
        raise ConfigError(
            f"--model {name}: no such directory{nearby(Path(name))}; as a hub id, it is not in the "
            f"cache of this machine, and {reason}; give the path of a directory, or download it "
            f"where there is a network (hf download {' '.join(hub_file(name) or [name])})"
        )


def _unreachable() -> str:
    """Why the hub cannot be asked; empty if it perhaps can. Takes half a second at most."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").lower() in _TRUE:
            return f"{variable} forbids asking the hub"
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return ""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    problems: list[str] = []

    def ask() -> None:  # in a thread: a name may take long to resolve
        try:
            socket.create_connection((hub.hostname or "", hub.port or 443), _HUB_S).close()
        except TimeoutError:
            pass
        except OSError as error:
            problems.append(f"{hub.hostname} cannot be reached ({error.strerror or error})")

    asking = threading.Thread(target=ask, name="ask_hub", daemon=True)
    asking.start()
    asking.join(_HUB_S)
    return problems[0] if problems else ""


def find_weights(name: str, find: Callable[[str], Path | None], named: str | None = None) -> Path:
    """Return the weights file or index; rejects anything that is not entirely safetensors.

    `find` returns the path of a file of the model, or None. `named` is the file that its
    configuration names. Raises `ConfigError`.
    """
    candidates = [named] if named else [WEIGHTS, INDEX]
    for candidate in candidates:
        if not str(candidate).endswith((SAFETENSORS, _INDEX_SUFFIX)):
            raise _unsafe(name, f"its configuration names {candidate!r}")
        found = find(candidate)
        if found is None:
            continue
        if str(candidate).endswith(_INDEX_SUFFIX):
            _check_index(name, found)
        return found
    others = [file for file in ("pytorch_model.bin", "pytorch_model.bin.index.json") if find(file)]
    there = f", only {others[0]}" if others else ""
    raise _unsafe(name, f"there is no {' and no '.join(map(str, candidates))}{there}")


def weight_files(weights: Path) -> list[Path]:
    """Return the files of the weights, given the only one or their index, sorted by name."""
    if not weights.name.endswith(_INDEX_SUFFIX):
        return [weights]
    index = json.loads(weights.read_text())
    return [weights.parent / name for name in sorted(set(index["weight_map"].values()))]


def weight_bytes(name: str) -> int | None:
    """Return the bytes of a model's weight files; None if some are not on this machine."""
    try:
        if is_gguf(name):
            return gguf_path(name).stat().st_size
        files = weight_files(find_weights(name, finder(name)))
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError, ConfigError):
        return None


def size_problem(target: int | None, draft: int | None) -> str:
    """Return what is wrong with a draft model of so many bytes beside a target's; else empty."""
    if not target or not draft or 2 * draft <= target:
        return ""
    if draft > target:
        return (
            f"the draft model has {draft / target:.1f} times the target's bytes: were --model and "
            "--draft-model swapped?"
        )
    return (
        "the draft model has more than half of the target's bytes; drafting will rarely pay off: "
        "use a smaller one"
    )


def _check_index(name: str, path: Path) -> None:
    """Reject an index that names anything but safetensors files beside it."""
    try:
        files = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {path.name} cannot be read: {error!r}") from None
    for file in sorted(map(str, files)):
        if not file.endswith(SAFETENSORS) or Path(file).name != file:
            raise _unsafe(name, f"{path.name} names {file!r}")


def _check_shards(name: str, weights: Path) -> None:
    """Reject a directory that lacks files of its index, as after an interrupted download."""
    files = weight_files(weights)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"--model {name}: {len(missing)} of its {len(files)} weights files are missing, "
            f"such as {missing[0]}; was the download interrupted?"
        )


def safetensors_header(path: Path) -> dict[str, Any]:
    """Return what a safetensors file says of its tensors, by name. Raises `OSError`, `ValueError`.

    8 bytes of length (little-endian), then JSON.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path}: header too large: {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _check_layers(name: str, config: Mapping[str, Any], weights: Path) -> None:
    """Reject a configuration with more layers than the weights have; building them may not end."""
    try:
        if weights.name.endswith(_INDEX_SUFFIX):
            tensors = json.loads(weights.read_text())["weight_map"]
        else:
            tensors = safetensors_header(weights)
    except (OSError, ValueError):
        return  # loading reports what is wrong
    stored = 1 + max((int(found[1]) for found in map(_LAYER.search, tensors) if found), default=-1)
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    for key in _NUM_LAYERS:
        count = text.get(key)
        if isinstance(count, int | float) and count > stored > 0:
            raise ConfigError(
                f"--model {name}: its {CONFIG} has {key} {count:,.0f}, but its weights have "
                f"{stored} layers; get both files from one model"
            )


def _unsafe(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--model {name}: {reason}; only safetensors weights are read, since other formats can run "
        "code. If you trust the weights, convert them with transformers' save_pretrained"
    )
