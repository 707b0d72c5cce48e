"""A run goes on only as it began, and its rows survive the end of the process at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flyspec.errors import ConfigError
from flyspec_lab.run_directory import SAMPLES, RowFile, digest, open_run

SETTINGS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.0, "top_p": 1.0},
    "models": {"target": {"weights_fingerprint": "abc", "numerics": "bfloat16"}},
    "drafters": {"model": "def"},
    "tasks": {"gsm8k": {"sha256": "123", "max_tokens": 256, "stop": []}},
}


def numbers(path: Path) -> list[int]:
    with RowFile(path) as file:
        return [row["number"] for row in file.read()]


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "run" / SAMPLES
    rows = [{"number": i, "text": "a\u2028b\n" * i, "none": None, "x": 0.1} for i in range(4)]
    with RowFile(path) as file:
        for count, row in enumerate(rows, 1):
            file.append(row)
            assert list(file.read()) == rows[:count]
        with pytest.raises(ConfigError, match="another process is writing"):
            RowFile(path)
    assert numbers(path) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="cannot be written"):
        RowFile(path / "run" / SAMPLES)


def test_a_file_cut_off_anywhere_has_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / SAMPLES
    with RowFile(path) as file:
        for i in range(3):
            file.append({"number": i})
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        assert numbers(path) == list(range(data[:cut].count(b"\n")))
        with RowFile(path) as file:
            file.append({"number": 9})
        assert numbers(path)[-1] == 9


WRITER = """
import itertools, sys
from pathlib import Path
from flyspec_lab.run_directory import RowFile
file = RowFile(Path(sys.argv[1]))
for number in itertools.count():
    file.append({"number": number})
    print(number, flush=True)
"""


def test_a_killed_process_has_written_what_it_said(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / SAMPLES)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().splitlines()
    process.wait()
    found = numbers(tmp_path / SAMPLES)
    assert found == list(range(len(found)))
    assert len(found) >= len(said)


def begin(path: Path, settings: dict[str, dict[str, Any]] = SETTINGS, resume: bool = False) -> None:
    with open_run(path, settings, resume):
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
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature: was 0.0, is 0.7"),
        ({"models": {"target": {"weights_fingerprint": "xyz"}}},
         "models.target.weights_fingerprint: was 'abc', is 'xyz'"),
        ({"drafters": {"model": "xyz"}}, "drafters.model: was 'def', is 'xyz'"),
        ({"tasks": {"gsm8k": {"sha256": "456"}}}, "tasks.gsm8k.sha256: was '123', is '456'"),
    ],
)  # fmt: skip
def test_what_differs_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError) as error:
        begin(tmp_path, SETTINGS | changes, resume=True)
    assert f"({said})" in str(error.value)


def test_a_run_may_grow_but_keeps_what_it_had(tmp_path: Path) -> None:
    begin(tmp_path)
    more = SETTINGS | {"tasks": {"mbpp": {"sha256": "7"}}, "models": {"rival": {"dtype": "x"}}}
    begin(tmp_path, more, resume=True)
    begin(tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"tasks\.mbpp\.sha256: was '7', is '8'"):
        begin(tmp_path, SETTINGS | {"tasks": {"mbpp": {"sha256": "8"}}}, resume=True)


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
        assert samples.path.is_file()
    assert not samples.path.parent.exists()


def test_digests_tell_files_and_their_names_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    one, whole = digest(str(tmp_path / "a")), digest(str(tmp_path))
    assert len(one) == 64
    assert one != whole
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest(str(tmp_path / "b")) == one
    assert digest(str(tmp_path)) != whole
    assert digest("") == ""
