"""What is open in a stack, as its operator sees it."""

from __future__ import annotations

import asyncio
import time

from flyspec.client import AdminClient
from flyspec.values.admin import Status


def left_open(status: Status) -> dict[str, int]:
    """Sessions with both services and generations: what must be gone when nobody asks."""
    return {
        "verify sessions": status.verify.sessions.active,
        "draft sessions": status.draft.sessions.active if status.draft else 0,
        "generations": status.active_generations,
        "waiting": status.waiting_generations,
    }


async def settled(admin: AdminClient, timeout_s: float) -> Status:
    """The status once nothing is open any more, or after that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = await admin.status()
        if not any(left_open(status).values()) or time.monotonic() > deadline:
            return status
        await asyncio.sleep(0.1)
