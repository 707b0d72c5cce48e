"""Logging of the services: one line an event, to standard error, as text or as JSON."""

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

_ONE_LINE = str.maketrans({"\n": "\\n", "\r": "\\r"})


class TextFormatter(logging.Formatter):
    """A line for people: time, service, level, message, then fields as `name=value`."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback; what a peer sent may be quoted in it, and stays in it."""
        line = super().formatMessage(record)
        parts = [line, *(f"{name}={value}" for name, value in _fields(record).items())]
        return " ".join(parts).translate(_ONE_LINE)


class JsonFormatter(logging.Formatter):
    """A line for machines: one JSON object, tracebacks inside it."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The object: time (RFC 3339, UTC), level, service, logger, message, and the fields."""
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


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The request's id, if the line belongs to one, and what was logged as `extra=fields(...)`."""
    found: dict[str, Any] = {}
    if identifier := request_id():
        found["request_id"] = identifier
    found.update(getattr(record, "fields", {}))
    return found


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a log call that adds named values to its line."""
    return {"fields": values}


@contextmanager
def session_line(log: logging.Logger, facts: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """A service's session, from its opening to its end: then, for debugging, a line with `facts`
    and the time that it took.
    """
    began_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        total_ms = round((time.perf_counter_ns() - began_ns) / 1e6, 1)
        log.debug("session ended", extra=fields(**facts(), total_ms=total_ms))


def configure_logging(service: str, level: str, log_format: LogFormat = "text") -> None:
    """Send this process's log to standard error, each line with the service's name."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A warning of a library is a line like any other.
    logging.captureWarnings(log_format == "json")
