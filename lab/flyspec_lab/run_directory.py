"""A run on disk: `run.json` (its settings), `samples.jsonl`, and the report of its last end.

The settings are what all samples have in common, kept beside them so that a run goes on as it
began.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.values.admin import DrafterStatus, ModelInfo

SETTINGS, SAMPLES = "run.json", "samples.jsonl"

RunSettings = Mapping[str, Mapping[str, Any]]
"""Settings that must be the same for a run to go on, in parts: `sampling`, `models`, `drafters` and
`tasks`. A part may gain entries, but each keeps its facts: of a model its weights, data type and
numerics, of a drafter its model's weights (where this process can know them), of a task its file's
digest and what selects and words its problems."""


class RowFile(AbstractContextManager["RowFile"]):
    """A file of JSON lines to which rows are appended; each is in it when `append` returns.

    What the end of a process cut off is removed. Close it, or use it as a context. Raises
    `ConfigError` if it cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path}: another process is writing to it") from None
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all rows, in order."""
        with self.path.open() as lines:
            yield from map(json.loads, lines)


@contextmanager
def open_run(path: Path | None, settings: RunSettings, resume: bool = False) -> Iterator[RowFile]:
    """Begin a run in a directory, or with `resume` go on with the one there; gives its rows.

    Without a directory, a run has one for as long as it takes. Raises `ConfigError` if there is one
    without `resume`, or if it was made with other settings, and says what differs.
    """
    if path is None:
        with (
            tempfile.TemporaryDirectory(prefix="flyspec-eval-") as own,
            RowFile(Path(own) / SAMPLES) as file,
        ):
            yield file
        return
    settings = _continued(path, settings, resume)
    with RowFile(path / SAMPLES) as file:
        unfinished = path / f"_{SETTINGS}"
        unfinished.write_text(json.dumps(settings, indent=2) + "\n")
        unfinished.replace(path / SETTINGS)
        yield file


def _continued(path: Path, settings: RunSettings, resume: bool) -> RunSettings:
    """Return the settings of a run that begins or goes on in a directory; raises as `open_run`."""
    file = path / SETTINGS
    if not file.exists():
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"--output {path}: is not the directory of a run, nor empty; give another one"
            )
        return settings
    if not resume:
        raise ConfigError(
            f"--output {path}: has a run; go on with it (--resume), or give another directory"
        )
    try:
        found = json.loads(file.read_text())
        before = {part: dict(found[part]) for part in settings}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: does not describe a run: {error!r}") from None
    differences = [
        f"{name}: was {was!r}, is {now!r}"
        for part in settings
        for name, was, now in _changed(part, before[part], settings[part])
    ]
    if differences:
        raise ConfigError(
            f"--resume: the run in {path} was made otherwise ({'; '.join(differences)}); use the "
            "same model and options, or begin another run"
        )
    return {part: {**before[part], **settings[part]} for part in settings}


def _changed(name: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() & after.keys():
            yield from _changed(f"{name}.{key}", before[key], after[key])
    elif before != after:
        yield name, before, after


def model_facts(model: ModelInfo) -> dict[str, Any]:
    """Return what a run keeps of a model."""
    return {name: getattr(model, name) for name in ("weights_fingerprint", "dtype", "numerics")}


def fingerprints(drafters: Sequence[DrafterStatus]) -> dict[str, str]:
    """Return the weights of drafters that have a model."""
    return {d.name: d.model.weights_fingerprint for d in drafters if d.model is not None}


def digest(path: str) -> str:
    """Return the SHA-256 of a file, or of all files in a directory; empty without one."""
    if path in ("", "-"):
        return ""
    root, found = Path(path).expanduser(), hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    for file in files:
        if root.is_dir():
            found.update(f"{file.relative_to(root)}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
