"""The draft service with one mistake: `python -m tests.loadtest.planted`, PLANTED names it.

What sets it off is a proposal of more tokens than the service makes, or a confidence of NaN.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from dataclasses import replace

from draft_service import server, service
from flyspec import rpc, wire
from flyspec.config import DraftSettings
from flyspec.errors import InvalidArgumentError
from flyspec.rpc import malformed, streams
from flyspec.serving import run
from flyspec.settings_sources import from_command_line
from flyspec.values.rounds import DraftChunk, DraftOpen
from flyspec.values.tokens import SamplingParams

receive, encode = streams.receive, wire.encode
held = []


def changed(value):
    if isinstance(value, DraftChunk):
        value = replace(value, token_ids=[token + 1 for token in value.token_ids])
    return encode(value)


async def hold():
    with held[0].open(DraftOpen([5], SamplingParams(), 1)):
        await asyncio.sleep(3600)


async def make_mistake(message):
    match os.environ["PLANTED"]:
        case "internal":
            raise ZeroDivisionError("planted")
        case "no_message":
            raise InvalidArgumentError("")
        case "dies":
            os._exit(3)
        case "hangs":
            time.sleep(3600)  # noqa: ASYNC251  the mistake
        case "traceback":
            error = ZeroDivisionError("planted")
            logging.getLogger("planted").error("planted", exc_info=error)
        case "accepted":
            message.advance.min_confidence, message.advance.max_tokens = 0.0, 1
        case "memory":
            held.append(os.urandom(1 << 10) * (20 << 10))
        case "sessions":
            held.append(asyncio.create_task(hold()))
        case "tokens":
            wire.encode = changed


async def build(settings, observer):
    held.append((await server.build(settings, observer))[0])
    return held[0], None


async def receive_badly(context):
    message = await receive(context)
    advance = getattr(message, "advance", None)
    if advance and (advance.max_tokens > 64 or math.isnan(advance.min_confidence)):
        await make_mistake(message)
    return message


if __name__ == "__main__":
    malformed.REQUEST_TIMEOUT_S = service.REQUEST_TIMEOUT_S = 1.0
    rpc.receive = streams.receive = receive_badly
    run(server.serve(from_command_line(DraftSettings, "draft_service"), build))
