"""Rows appended to columnar files, one by one, that survive the end of the process at any moment.

A directory has whole parts, `part-00000.parquet`, and while rows are being added an Arrow IPC
stream of those since the last part, `_part-00001.arrows`: every row is one message of it, written
at once. A part is written beside the stream, renamed, and then takes its place. Whatever is cut off
at the end of a stream is the one row that was being written. Readers of Parquet (pandas, polars,
DuckDB: `SELECT * FROM 'DIRECTORY/*.parquet'`) skip names with an underscore.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from flyspec.errors import ConfigError

ROWS_PER_PART = 1000


class RowFiles(contextlib.AbstractContextManager["RowFiles"]):
    """The rows of a schema in a directory, which it makes. Close it, or use it as a context.

    Raises `ConfigError` if the directory cannot be written, or another process is writing to it.
    """

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.directory, self.schema = directory, schema
        self._count = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "_lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"{directory}: another process is writing to it") from None
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be written: {error.strerror}") from None
        for stream in sorted(directory.glob("_part-*.arrows")):
            _finish(stream, self.schema)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _parts(self) -> list[Path]:
        return sorted(self.directory.glob("part-*.parquet"))

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; a column that it lacks is null. It is in the file when this returns."""
        if self._writer is None:
            number = max((int(p.stem.removeprefix("part-")) for p in self._parts), default=-1) + 1
            self._file = (self.directory / f"_part-{number:05}.arrows").open("wb", buffering=0)
            self._writer = pa.ipc.new_stream(self._file, self.schema)
        self._writer.write_batch(pa.RecordBatch.from_pylist([row], schema=self.schema))
        self._count += 1
        if self._count >= ROWS_PER_PART:
            self._settle()

    def _settle(self) -> None:
        """Make a part of the rows since the last one."""
        if self._file is None or self._writer is None:
            return
        self._writer.close()
        self._file.close()
        _finish(Path(self._file.name), self.schema)
        self._file = self._writer = None
        self._count = 0

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return these columns of all rows, in order. Those that an older part lacks are null."""
        self._settle()
        names = list(columns or self.schema.names)
        parts = [str(part) for part in self._parts]
        if not parts:
            return self.schema.empty_table().select(names)
        return ds.dataset(parts, schema=self.schema, format="parquet").to_table(names)

    def close(self) -> None:
        """Make a part of what is left, and let others write."""
        self._settle()
        self._lock.close()
        with contextlib.suppress(OSError):
            (self.directory / "_lock").unlink()


def _finish(stream: Path, schema: pa.Schema) -> None:
    """Replace a stream, which may be cut off, by a part with its rows."""
    part = stream.with_name(stream.stem.removeprefix("_") + ".parquet")
    if not part.exists():  # else the process ended between the two steps
        table = pa.Table.from_batches(list(_whole_batches(stream)), schema)
        if len(table):
            unfinished = part.with_name(f"_{part.name}")
            with unfinished.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(part)
    stream.unlink()


def _whole_batches(stream: Path) -> Iterator[pa.RecordBatch]:
    """Yield a stream's batches up to where it is cut off."""
    with stream.open("rb") as file, contextlib.suppress(pa.ArrowInvalid, OSError, StopIteration):
        reader = pa.ipc.open_stream(file)
        while True:
            yield reader.read_next_batch()
