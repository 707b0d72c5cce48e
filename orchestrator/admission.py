"""Admission: as many generations run as the services hold, a bounded number waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from flyspec.errors import ResourceExhaustedError


class Admission:
    """Counts running and waiting generations; first come, first served."""

    def __init__(self, max_concurrent: int, max_waiting: int) -> None:
        self._semaphore = asyncio.Semaphore(max_concurrent)
        self._max_concurrent, self._max_waiting = max_concurrent, max_waiting
        self.active = 0
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait to be admitted. Raises `ResourceExhaustedError` when too many wait already."""
        if self._semaphore.locked() and self.waiting >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_concurrent} generations run and {self.waiting} wait; retry later"
            )
        self.waiting += 1
        try:
            await self._semaphore.acquire()
        finally:
            self.waiting -= 1
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self._semaphore.release()
