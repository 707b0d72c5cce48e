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


async def internal(message):
    raise ZeroDivisionError("planted")


async def dies(message):
    os._exit(3)


async def hangs(message):
    time.sleep(3600)  # noqa: ASYNC251  the mistake


async def no_message(message):
    raise InvalidArgumentError("")


async def traceback(message):
    logging.getLogger("planted").error("planted", exc_info=ZeroDivisionError("planted"))


async def accepted(message):
    message.advance.min_confidence, message.advance.max_tokens = 0.0, 1


async def memory(message):
    held.append(os.urandom(1 << 10) * (20 << 10))


async def sessions(message):
    async def hold():
        with held[0].open(DraftOpen([5], SamplingParams(), 1)):
            await asyncio.sleep(3600)

    held.append(asyncio.create_task(hold()))


async def tokens(message):
    def changed(value):
        if isinstance(value, DraftChunk):
            value = replace(value, token_ids=[token + 1 for token in value.token_ids])
        return encode(value)

    wire.encode = changed


KINDS = (internal, dies, hangs, no_message, traceback, accepted, memory, sessions, tokens)
MISTAKES = {kind.__name__: kind for kind in KINDS}


async def build(settings, observer):
    held.append((await server.build(settings, observer))[0])
    return held[0], None


async def receive_badly(context):
    message = await receive(context)
    advance = getattr(message, "advance", None)
    if advance and (advance.max_tokens > 64 or math.isnan(advance.min_confidence)):
        await MISTAKES[os.environ["PLANTED"]](message)
    return message


if __name__ == "__main__":
    malformed.REQUEST_TIMEOUT_S = service.REQUEST_TIMEOUT_S = 1.0
    rpc.receive = streams.receive = receive_badly
    run(server.serve(from_command_line(DraftSettings, "draft_service"), build))
