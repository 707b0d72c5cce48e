"""The short form of `loadtest.fuzz`: against servers in this process, with tiny models."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from loadtest.fuzz.run import FuzzRun


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


async def fuzz(name, addresses, calls):
    """Fuzz a running server; nothing may be wrong."""
    with logged() as lines:
        async with FuzzRun(name, addresses, seed=1, log=lines) as run:
            await run.run(calls)
    assert all(check.passed for check in run.checks()), "\n".join(c.said for c in run.checks())
    assert run.calls >= calls
    return run
