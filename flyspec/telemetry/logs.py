"""Logging of the services: one line per event on standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from flyspec.telemetry.request_ids import request_id

LogFormat = Literal["text", "json"]

_CONTROL = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ONE_LINE = {code: ascii(chr(code))[1:-1] for code in _CONTROL}
MAX_PER_SECOND = 10
"""Maximum lines of `errors_returned`."""


class TextFormatter(logging.Formatter):
    """Text lines: time, service, level, message, then fields as `name=value`.

    A value that could be taken for more than one is a JSON string.
    """

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format all but the traceback on one line, even if it quotes line breaks from a peer."""
        line = super().formatMessage(record)
        parts = [line, *(f"{name}={_value(value)}" for name, value in _fields(record).items())]
        return " ".join(parts).translate(_ONE_LINE)


class JsonFormatter(logging.Formatter):
    """JSON lines: one object each, including tracebacks."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return time (RFC 3339, UTC), level, service, logger, message and the fields as JSON."""
        created = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _value(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the request ID, if any, and the fields of `extra=fields(...)`."""
    found: dict[str, Any] = {}
    if identifier := request_id():
        found["request_id"] = identifier
    found.update(getattr(record, "fields", {}))
    return found


def fields(**values: Any) -> dict[str, Any]:
    """Return `extra` for a log call, to add these fields to its line."""
    return {"fields": values}


class _Bounded(logging.Filter):
    """Drops what exceeds `MAX_PER_SECOND`; the next line has the number of those dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._count, self._dropped = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > MAX_PER_SECOND:
            self._dropped += 1
            return False
        if self._dropped:
            record.__dict__.update(fields(**_fields(record), not_logged=self._dropped))
            self._dropped = 0
        return True


errors_returned = logging.getLogger("flyspec.errors_returned")
"""For requests and calls that end with an error: refused clients must not fill the disk."""
errors_returned.addFilter(_Bounded())


@contextmanager
def session_line(log: logging.Logger, facts: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Log, at debug level when a session ends, `facts()` and its duration."""
    began_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        total_ms = round((time.perf_counter_ns() - began_ns) / 1e6, 1)
        log.debug("session ended", extra=fields(**facts(), total_ms=total_ms))


def _reached_someone(record: logging.LogRecord) -> bool:
    """True if this is not grpc.aio's traceback for a status whose client has disconnected."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def configure_logging(service: str, level: str, log_format: LogFormat = "text") -> None:
    """Log to standard error, with the service's name in each line."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_reached_someone)
    # Libraries' warnings must be JSON lines too.
    logging.captureWarnings(log_format == "json")
