"""The short form of `bench.fuzz`: against servers in this process, with tiny models."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from bench.fuzz.run import FuzzRun


@contextmanager
def logged(level=logging.WARNING):
    """Collect the lines logged meanwhile."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.extend(self.format(record).splitlines())

    handler = Keep(level)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


async def fuzz(server, target, messages, seed):
    """Fuzz an attached target; there must be no findings."""
    with logged() as lines:
        run = FuzzRun(server, target, seed, lines)
        try:
            await run.run(messages)
        finally:
            await target.stop()
    assert run.report.passed, str(run.report)
    assert run.report.messages >= messages
    return run.report
