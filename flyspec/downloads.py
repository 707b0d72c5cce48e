"""Downloads what serving a model needs from its hub, into the hub's cache on this machine.

Configuration, tokenizer and safetensors, or one GGUF file, and nothing else. What the cache has is
not asked for again. `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean
to other programs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.hub import (
    cached_gguf,
    choose_gguf,
    first_parts,
    hub_file,
    is_hub_id,
    is_path,
    parts_of,
    snapshot,
)
from flyspec.model_files import (
    ADAPTER,
    CONFIG,
    TOKENIZERS,
    check_reachable,
    find_weights,
    finder,
    nearby,
    weight_files,
)

_SMALL = (".json", ".jinja", ".model", ".txt")
"""Suffixes of what is not weights: configuration, tokenizer, chat template."""


def download(name: str) -> None:
    """Have all files of `--model NAME` on this machine, if it is on a hub.

    Says on standard error what is downloaded. Raises `ConfigError`.
    """
    if is_path(name) or not (is_hub_id(name) or hub_file(name)) or _is_complete(name):
        return
    check_reachable(name)
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    host, repo = endpoint.split("://")[-1], (hub_file(name) or (name, ""))[0]
    try:
        with _interruptible():
            _download(name, repo, endpoint)
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"--model {name}: is gated: ask for access at {endpoint}/{repo}, then give a token "
            "(hf auth login, or HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"--model {name}: no such directory{nearby(Path(name))}, and no such repository at "
            f"{host}, unless it is private (hf auth login, or HF_TOKEN)"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # the hub's library and those below it have their own bases
        reason = " ".join(str(error).split()) or repr(error)
        raise ConfigError(
            f"--model {name}: cannot be downloaded from {host}: {reason:.300}"
        ) from error


def _is_complete(name: str) -> bool:
    if wanted := hub_file(name):
        return cached_gguf(name, *wanted) is not None
    find = finder(name)
    try:
        config = json.loads((find(CONFIG) or Path()).read_text())
        weights = weight_files(find_weights(name, find, config.get("transformers_weights")))
    except (OSError, ValueError, ConfigError):
        return False
    return all(file.is_file() for file in weights) and any(map(find, TOKENIZERS))


def _download(name: str, repo: str, endpoint: str) -> None:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if wanted := hub_file(name):
        files = parts_of(choose_gguf(name, wanted[1], sizes))
        if missing := [file for file in files if file not in sizes]:
            raise ConfigError(f"--model {name}: the repository lacks {', '.join(missing)}")
        _fetch(name, repo, {file: sizes[file] for file in files}, endpoint)
        return
    if CONFIG not in sizes:
        raise ConfigError(f"--model {name}: {_no_config(name, sizes)}")
    small = {f: size for f, size in sizes.items() if "/" not in f and f.endswith(_SMALL)}
    folder = _fetch(name, repo, small)
    config = json.loads((folder / CONFIG).read_text())

    def find(file: str) -> Path | None:
        return folder / file if file in sizes else None

    weights = weight_files(find_weights(name, find, config.get("transformers_weights")))
    files = [file.relative_to(folder).as_posix() for file in weights]
    _fetch(name, repo, {file: sizes.get(file, 0) for file in files}, endpoint)


def _no_config(name: str, files: Mapping[str, int]) -> str:
    if found := first_parts(files):
        return f"has no safetensors; give one of its GGUF files, such as {name}:{found[0]}" + (
            f" (the others: {', '.join(found[1:])})" if found[1:] else ""
        )
    kind = "is an adapter, not a model; merge it" if ADAPTER in files else f"has no {CONFIG}"
    return f"the repository {kind}"


def _fetch(name: str, repo: str, files: Mapping[str, int], endpoint: str = "") -> Path:
    """Download files one after the other, so that Ctrl-C ends it; return their folder."""
    from huggingface_hub import hf_hub_download
    from rich.filesize import decimal

    if endpoint:
        size, count = decimal(sum(files.values())), len(files)
        what = f"{name}: {size}{f' in {count} files' if count > 1 else ''}"
        print(f"downloading {what} from {endpoint}", file=sys.stderr, flush=True)
    for file in files:
        hf_hub_download(repo, file)
    folder = snapshot(repo)
    assert folder is not None, "a downloaded file is in a snapshot"
    return folder


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end what runs, also where an event loop would notice it only afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
