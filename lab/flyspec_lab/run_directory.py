"""A run on disk: `run.json` (its settings), `samples/`, and `report.json` of its last end.

Without a directory, a run has one for as long as it takes. The settings are what all samples have
in common, kept beside them so that a run goes on as it began.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from flyspec.errors import ConfigError
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec.version import __version__
from flyspec_lab.row_files import RowFiles
from flyspec_lab.samples import SCHEMA

SETTINGS = "run.json"


@dataclass(frozen=True)
class RunSettings:
    """Settings that must be the same for a run to go on; `differences` compares.

    `models`, `drafters` and `tasks` may gain entries, but each keeps its facts: of a model its
    weights, data type and numerics, of a drafter its model's weights (where this process can know
    them), of a task its file's digest and what selects and words its problems.
    """

    version: str
    sampling: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    drafters: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises `ConfigError`."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: does not describe a run: {error}") from None

    def write(self, path: Path) -> None:
        unfinished = path.with_name(f"_{path.name}")
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n")
        unfinished.replace(path)

    def joined(self, other: Self) -> Self:
        """Return these settings with what `other` adds to them."""
        mine, theirs = asdict(self), asdict(other)
        parts = {name: {**mine[name], **theirs[name]} for name in ("models", "drafters", "tasks")}
        return type(self)(other.version, other.sampling, **parts)

    def differences(self, now: Self) -> list[str]:
        """Say what is not as it was, but for the version."""
        mine, theirs = asdict(self), asdict(now)
        return [
            f"{name}: was {before!r}, is {after!r}"
            for part in ("sampling", "models", "drafters", "tasks")
            for name, before, after in _changed(part, mine[part], theirs[part])
        ]


def _changed(name: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() & after.keys():
            yield from _changed(f"{name}.{key}", before[key], after[key])
    elif before != after:
        yield name, before, after


@contextmanager
def open_run(
    path: Path | None, settings: RunSettings, resume: bool = False, mixed_versions: bool = False
) -> Iterator[RowFiles]:
    """Begin a run in a directory, or with `resume` go on with the one there; gives its samples.

    Raises `ConfigError` if there is one without `resume`, or if it was made with other settings or,
    without `mixed_versions`, by another version of flyspec; it says what differs.
    """
    if path is None:
        with (
            tempfile.TemporaryDirectory(prefix="flyspec-eval-") as own,
            RowFiles(Path(own), SCHEMA) as samples,
        ):
            yield samples
        return
    settings = continued(path, settings, resume, mixed_versions)
    with RowFiles(path / "samples", SCHEMA) as samples:
        settings.write(path / SETTINGS)
        yield samples


def continued(
    path: Path, settings: RunSettings, resume: bool = False, mixed_versions: bool = False
) -> RunSettings:
    """Return the settings of a run that begins or goes on in a directory; raises as `open_run`."""
    file = path / SETTINGS
    if not file.exists():
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"--output {path}: is not the directory of a run, nor empty; give another one"
            )
        return settings
    before = RunSettings.read(file)
    if not resume:
        raise ConfigError(
            f"--output {path}: has a run; go on with it (--resume), or give another directory"
        )
    if differences := before.differences(settings):
        raise ConfigError(
            f"--resume: the run in {path} was made otherwise ({'; '.join(differences)}); use the "
            "same model and options, or begin another run"
        )
    if before.version != settings.version and not mixed_versions:
        raise ConfigError(
            f"--resume: the run in {path} was made by flyspec {before.version}, this is "
            f"{settings.version}; begin another run, or allow both in it (--mixed-versions)"
        )
    return before.joined(settings)


def model_facts(model: ModelInfo) -> dict[str, Any]:
    """Return what a run keeps of a model."""
    return {name: getattr(model, name) for name in ("weights_fingerprint", "dtype", "numerics")}


def fingerprints(drafters: Sequence[DrafterStatus]) -> dict[str, str]:
    """Return the weights of drafters that have a model."""
    return {d.name: d.model.weights_fingerprint for d in drafters if d.model is not None}


def digest(path: str | None) -> str:
    """Return the SHA-256 of a file, or of all files in a directory; empty without one."""
    if path is None or path == "-":
        return ""
    root, found = Path(path).expanduser(), hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    for file in files:
        if root.is_dir():
            found.update(f"{file.relative_to(root)}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


@cache
def code_version() -> str:
    """Return flyspec's version; in a checkout, with its commit, and `.changed` if it has changes.

    As in versions of PyPA: `0.1.0+g1234567.changed`.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return __version__

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    product = ("flyspec", "verify_service", "draft_service", "orchestrator")
    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *product)
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__}+g{commit}" + (".changed" if changed else "")
