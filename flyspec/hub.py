"""Names of models on a hub, and what its cache on this machine has of them.

`OWNER/NAME` is a repository in Hugging Face format, `OWNER/NAME:FILE.gguf` a GGUF file of one, and
`OWNER/NAME:Q4_K_M` its only GGUF model of that type. The cache is the hub's own (`HF_HOME`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flyspec.errors import ConfigError

GGUF = ".gguf"
"""Suffix of files in llama.cpp's format."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([\w.-]+(?:/[\w.-]+)*)")


def is_path(name: str) -> bool:
    """True if `--model NAME` is a path, rather than a name on a hub."""
    return name.startswith((".", "/", "~")) or Path(name).exists()


def is_hub_id(name: str) -> bool:
    """True if a name that is no path is spelled as a repository's."""
    return _HUB_ID.fullmatch(name) is not None


def hub_file(name: str) -> tuple[str, str] | None:
    """Return the repository and the GGUF file, or type, of `OWNER/NAME:FILE`; None for others."""
    found = None if is_path(name) else _HUB_FILE.fullmatch(name)
    return (found[1], found[2]) if found else None


def snapshot(repo: str) -> Path | None:
    """Return the folder of a repository's newest commit in the cache, which may lack files."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    folder = Path(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return found if found.is_dir() else None


def first_parts(files: Iterable[str]) -> list[str]:
    """Return the GGUF models among files: of one in several parts, the first."""
    found = ((file, _PART.search(file)) for file in files if file.endswith(GGUF))
    return sorted(file for file, part in found if part is None or int(part[1]) == 1)


def parts_of(first: str) -> list[str]:
    """Return the files of a GGUF model, given the only or first one."""
    part = _PART.search(first)
    if part is None:
        return [first]
    stem, count = first[: part.start()], part[2]
    return [f"{stem}-{i:05}-of-{count}{GGUF}" for i in range(1, int(count) + 1)]


def choose_gguf(name: str, wanted: str, files: Iterable[str]) -> str:
    """Return the file of a repository that `--model NAME` wants, by its path or by its type.

    Raises `ConfigError` with what there is.
    """
    there = first_parts(files)
    found = [file for file in there if file == wanted]
    if not found and not wanted.endswith(GGUF):
        type_ = re.compile(rf"[.-]{re.escape(wanted)}[.-]", re.IGNORECASE)
        found = [file for file in there if type_.search(Path(file).name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or there) or "none"
    problem = "names several" if found else "no such file"
    raise ConfigError(f"--model {name}: {problem}; GGUF files there: {listed}")


def cached_gguf(name: str, repo: str, wanted: str) -> Path | None:
    """Return the file of `REPO:WANTED` if all its parts are in the cache."""
    folder = snapshot(repo)
    if folder is None:
        return None
    files = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    try:
        first = choose_gguf(name, wanted, files)
    except ConfigError:
        return None
    return folder / first if all((folder / part).is_file() for part in parts_of(first)) else None
