"""What all samples of a run have in common, kept beside them so that a run goes on as it began."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from flyspec.errors import ConfigError
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec.version import __version__


@dataclass(frozen=True)
class RunSettings:
    """What must be the same for a run to go on; `differences` compares.

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
        return type(self)(
            other.version,
            other.sampling,
            {**self.models, **other.models},
            {**self.drafters, **other.drafters},
            {**self.tasks, **other.tasks},
        )

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


def model_facts(model: ModelInfo) -> dict[str, Any]:
    return {
        "weights_fingerprint": model.weights_fingerprint,
        "dtype": model.dtype,
        "numerics": model.numerics,
    }


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
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "flyspec",
             "verify_service", "draft_service", "orchestrator"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__}+g{commit}" + (".changed" if changed else "")


def fingerprints(drafters: Sequence[DrafterStatus]) -> dict[str, str]:
    """Return the weights of drafters that have a model."""
    return {d.name: d.model.weights_fingerprint for d in drafters if d.model is not None}
