"""A run goes on only as it began, and says what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec.version import __version__
from flyspec_lab.run_directory import RunSettings, code_version, digest, open_run

SETTINGS = RunSettings(
    "1.0",
    {"temperature": 0.0, "top_p": 1.0},
    {"target": {"weights_fingerprint": "abc", "numerics": "bfloat16"}},
    {"model": "def"},
    {"gsm8k": {"sha256": "123", "max_tokens": 256, "stop": []}},
)


def begin(path: Path, settings: RunSettings = SETTINGS, **known: bool) -> None:
    with open_run(path, settings, **known):
        pass


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    path = tmp_path / "run"
    begin(path, resume=True)  # there is nothing yet
    begin(path, resume=True)
    with pytest.raises(ConfigError, match=r"has a run; go on with it \(--resume\)"):
        begin(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": {"temperature": 0.7, "top_p": 1.0}},
         "sampling.temperature: was 0.0, is 0.7"),
        ({"models": {"target": {"weights_fingerprint": "xyz", "numerics": "bfloat16"}}},
         "models.target.weights_fingerprint: was 'abc', is 'xyz'"),
        ({"drafters": {"model": "xyz"}}, "drafters.model: was 'def', is 'xyz'"),
        ({"tasks": {"gsm8k": {"sha256": "456", "max_tokens": 256, "stop": []}}},
         "tasks.gsm8k.sha256: was '123', is '456'"),
    ],
)  # fmt: skip
def test_what_differs_is_said(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError) as error:
        begin(tmp_path, replace(SETTINGS, **changes), resume=True)  # type: ignore[arg-type]
    assert f"({said})" in str(error.value)


def test_a_run_may_grow(tmp_path: Path) -> None:
    begin(tmp_path)
    more = replace(SETTINGS, tasks={"mbpp": {"sha256": "7"}}, models={"rival": {"dtype": "x"}})
    begin(tmp_path, more, resume=True)
    kept = RunSettings.read(tmp_path / "run.json")
    assert set(kept.tasks) == {"gsm8k", "mbpp"}
    assert set(kept.models) == {"target", "rival"}


def test_another_version_goes_on_only_if_asked(tmp_path: Path) -> None:
    begin(tmp_path)
    later = replace(SETTINGS, version="1.1")
    with pytest.raises(ConfigError, match=r"made by flyspec 1\.0, this is 1\.1; begin another"):
        begin(tmp_path, later, resume=True)
    begin(tmp_path, later, resume=True, mixed_versions=True)


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not the directory of a run, nor empty"):
        begin(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="not the directory of a run"):
        begin(tmp_path / "thesis.txt")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json: does not describe a run"):
        begin(tmp_path, resume=True)


def test_without_a_directory_nothing_is_left() -> None:
    with open_run(None, SETTINGS) as samples:
        directory = samples.directory
        assert directory.is_dir()
    assert not directory.exists()


def test_digests_tell_files_and_their_names_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    one, whole = digest(str(tmp_path / "a")), digest(str(tmp_path))
    assert len(one) == 64
    assert one != whole
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest(str(tmp_path / "b")) == one
    assert digest(str(tmp_path)) != whole
    assert digest(None) == ""


def test_the_version_names_the_commit() -> None:
    assert code_version().startswith(__version__)
