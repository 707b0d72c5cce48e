"""Reading and writing a stream's messages, for as long as its client may be silent."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from flyspec.errors import IdleTimeoutError
from flyspec.malformed import check_read


async def read(context: Any, idle_timeout_s: float) -> Any:
    """The next message of a stream, None at its end; `IdleTimeoutError` when none comes."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            message = await context.read()
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"no message for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error
    check_read(message)
    return None if message is grpc.aio.EOF else message


async def write(context: Any, message: Any, idle_timeout_s: float) -> None:
    """Send a message of a stream; `IdleTimeoutError` when the client does not read for so long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"nothing was read for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error
