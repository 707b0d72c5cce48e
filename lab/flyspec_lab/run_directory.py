"""A run on disk: `run.json` (its settings), `samples/`, `forks/`, `report.json` of its last end.

Without a directory, a run has one for as long as it takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flyspec.errors import ConfigError
from flyspec_lab.forks import FORK_SCHEMA
from flyspec_lab.row_files import RowFiles
from flyspec_lab.samples import SCHEMA
from flyspec_lab.settings import RunSettings

SETTINGS = "run.json"


@dataclass(frozen=True)
class RunDirectory:
    """The rows of a run that goes on."""

    samples: RowFiles
    forks: RowFiles


@contextmanager
def open_run(
    path: Path | None, settings: RunSettings, resume: bool = False, mixed_versions: bool = False
) -> Iterator[RunDirectory]:
    """Begin a run in a directory, or with `resume` go on with the one that is there.

    Raises `ConfigError` if there is one without `resume`, or if it was made with other settings or,
    without `mixed_versions`, by another version of flyspec; it says what differs.
    """
    if path is None:
        with tempfile.TemporaryDirectory(prefix="flyspec-eval-") as own, _open(Path(own)) as run:
            yield run
        return
    settings = continued(path, settings, resume, mixed_versions)
    with _open(path) as run:
        settings.write(path / SETTINGS)
        yield run


def continued(
    path: Path, settings: RunSettings, resume: bool = False, mixed_versions: bool = False
) -> RunSettings:
    """Return the settings of a run that begins or goes on in a directory; raises as `open_run`."""
    file = path / SETTINGS
    before = RunSettings.read(file) if file.exists() else None
    if before is not None:
        if not resume:
            raise ConfigError(
                f"--output {path}: has a run; go on with it (--resume), or give another directory"
            )
        _check(path, before, settings, mixed_versions)
        return before.joined(settings)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"--output {path}: is not the directory of a run, nor empty; give another one"
        )
    return settings


@contextmanager
def _open(path: Path) -> Iterator[RunDirectory]:
    with (
        RowFiles(path / "samples", SCHEMA) as samples,
        RowFiles(path / "forks", FORK_SCHEMA) as forks,
    ):
        yield RunDirectory(samples, forks)


def _check(path: Path, before: RunSettings, now: RunSettings, mixed_versions: bool) -> None:
    if differences := before.differences(now):
        raise ConfigError(
            f"--resume: the run in {path} was made otherwise ({'; '.join(differences)}); use the "
            "same model and options, or begin another run"
        )
    if before.version != now.version and not mixed_versions:
        raise ConfigError(
            f"--resume: the run in {path} was made by flyspec {before.version}, this is "
            f"{now.version}; begin another run, or allow both in it (--mixed-versions)"
        )
