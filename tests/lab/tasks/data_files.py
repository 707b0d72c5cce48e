"""Writes small data sets in the public formats, of our own sentences."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flyspec_lab.tasks import Task

# Real data sets, which are no part of the project: `make check-exact` has them from there as well.
DATA = Path(os.environ.get("DATA", Path(__file__).resolve().parents[4] / "shared/data"))


def real(name: str) -> str:
    """Return the path of a real data set, or skip the test."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not in {DATA}; set DATA to where it is")
    return str(path)


def shots(task: type[Task], count: int) -> Callable[..., Any]:
    """Return the task with another number of examples before each question."""
    return type(task.__name__, (task,), {"num_shots": count})


def json_lines(path: Path, rows: Sequence[Any]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def json_array(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1))
    return str(path)


def parquet(path: Path, rows: Sequence[Any]) -> str:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
    return str(path)
