"""Logging of the services: one line an event, to standard error."""

from __future__ import annotations

import logging
import sys


def configure_logging(service: str, level: str) -> None:
    """Send this process's log to standard error, each line with the service's name."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
