"""Rows survive the end of the process at any moment, and nothing else is there afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flyspec.errors import ConfigError
from flyspec_lab import row_files
from flyspec_lab.row_files import RowFiles

SCHEMA = pa.schema([("number", pa.int64()), ("words", pa.list_(pa.string()))])


def row(number: int) -> dict[str, object]:
    return {"number": number, "words": [f"word {number}"] * (number % 3)}


def numbers(directory: Path) -> list[int]:
    with RowFiles(directory, SCHEMA) as files:
        return files.read(["number"]).column("number").to_pylist()


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    with RowFiles(tmp_path, SCHEMA) as files:
        for i in range(5):
            files.append(row(i))
            assert files.read().to_pylist() == [row(j) for j in range(i + 1)]
    with RowFiles(tmp_path, SCHEMA) as files:
        files.append({"number": 9})
        assert files.read().to_pylist()[-1] == {"number": 9, "words": None}
    assert pq.read_table(tmp_path).num_rows == 6  # as any reader of Parquet sees it
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("part-")] == []


def test_there_are_parts_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROWS_PER_PART", 10)
    with RowFiles(tmp_path, SCHEMA) as files:
        for i in range(25):
            files.append(row(i))
        assert len(list(tmp_path.glob("part-*.parquet"))) == 2
    assert len(list(tmp_path.glob("part-*.parquet"))) == 3
    assert numbers(tmp_path) == list(range(25))


def stream_of(directory: Path, count: int) -> bytes:
    """Return the bytes of a stream of rows that has not become a part."""
    files = RowFiles(directory, SCHEMA)
    for i in range(count):
        files.append(row(i))
    (stream,) = directory.glob("_part-*.arrows")
    data = stream.read_bytes()
    files.close()
    return data


def test_a_stream_cut_off_anywhere_has_its_whole_rows(tmp_path: Path) -> None:
    data = stream_of(tmp_path / "whole", 4)
    found = []
    for cut in range(0, len(data) + 1, 8):  # messages are aligned to 8 bytes; between: see below
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir()
        (directory / "_part-00000.arrows").write_bytes(data[:cut])
        found.append(numbers(directory))
        assert not list(directory.glob("*.arrows"))
    assert all(of == list(range(len(of))) for of in found)
    assert [len(of) for of in found] == sorted(len(of) for of in found)
    assert found[0] == []
    assert found[-1] == [0, 1, 2, 3]
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "_part-00000.arrows").write_bytes(data[:-3])
    assert numbers(odd) in ([0, 1, 2], [0, 1, 2, 3])


def test_the_end_between_two_steps_duplicates_nothing(tmp_path: Path) -> None:
    data = stream_of(tmp_path, 4)  # now a part
    (tmp_path / "_part-00000.arrows").write_bytes(data)
    assert numbers(tmp_path) == [0, 1, 2, 3]
    # Before the part was renamed:
    (tmp_path / "part-00000.parquet").unlink()
    (tmp_path / "_part-00000.arrows").write_bytes(data)
    (tmp_path / "_part-00000.parquet").write_bytes(b"half a part")
    assert numbers(tmp_path) == [0, 1, 2, 3]
    assert pq.read_table(tmp_path).num_rows == 4


WRITER = """
import sys
from pathlib import Path
from tests.lab.test_row_files import SCHEMA, row
from flyspec_lab.row_files import RowFiles
files = RowFiles(Path(sys.argv[1]), SCHEMA)
number = files.read(["number"]).num_rows
while True:
    files.append(row(number))
    number += 1
    print(number, flush=True)
"""


def test_a_killed_process_has_written_what_it_said(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    said = 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root}/lab"}, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(30):
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        said = int(rest[-1]) if rest else said
        assert len(list(tmp_path.glob("_part-*.arrows"))) == 1
    found = numbers(tmp_path)
    assert found == list(range(len(found)))
    assert len(found) >= said


def test_two_processes_cannot_write_to_the_same_files(tmp_path: Path) -> None:
    with RowFiles(tmp_path, SCHEMA), pytest.raises(ConfigError, match="another process is writing"):
        RowFiles(tmp_path, SCHEMA)
    assert numbers(tmp_path) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RowFiles(tmp_path / "file" / "run", SCHEMA)


def test_a_column_that_older_parts_lack_is_null(tmp_path: Path) -> None:
    with RowFiles(tmp_path, SCHEMA) as files:
        files.append(row(1))
    wider = SCHEMA.append(pa.field("later", pa.float64()))
    with RowFiles(tmp_path, wider) as files:
        files.append({**row(2), "later": 0.5})
        assert files.read(["number", "later"]).to_pylist() == [
            {"number": 1, "later": None}, {"number": 2, "later": 0.5},
        ]  # fmt: skip
