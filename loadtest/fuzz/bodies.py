"""Bodies of the maximum size, of every shape that costs much to read, sent over HTTP while another
client streams: one at a time, then several at once. Its stream may not be held up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise

from flyspec.cli.program import say
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.rpc import max_request_bytes
from flyspec.tables import FittedTable, make_table
from loadtest.figures import Check
from loadtest.fuzz.sessions import SMALL

CONTEXT, MAX_SILENCE_S, PATIENCE_S = 4096, 0.2, 300.0
AT_ONCE, QUIET_S = 6, 3.0
CHAT = ("/v1/chat/completions", '{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],')
SHAPES = (
    (*CHAT, '"speculation":{"num_draft_tokens_per_round":[', "1"),
    (*CHAT, '"speculation":{"phases":[', "{}"),
    (*CHAT, '"speculation":{"phases":[{"until":[', '""'),
    (*CHAT, '"speculation":{"phases":', "["),
    (*CHAT, '"stop":[', '"a"'),
    (*CHAT, '"stop_token_ids":[', "9" * 4200),
    (*CHAT, '"logit_bias":{', '"1":1'),
    (*CHAT, '"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[', '"a"'),
    (*CHAT, '"documents":[', '{"a":{}}'),
    (*CHAT, '"metadata":{', '"a":[]'),
    (*CHAT, '"chat_template_kwargs":{', '"a":{}'),
    (*CHAT, '"prediction":{"type":"content","content":"', "one two "),
    (*CHAT, '"frobnicate":[', "{}"),
    (*CHAT, '"user":"', '\\"'),
    (*CHAT, '"messages":[', '{"role":"","content":""}'),
    (*CHAT, '"messages":[{"role":"user","content":[', '{"type":"text","text":""}'),
    (*CHAT, '"messages":[{"role":"user","content":"', "one, two; "),
    (*CHAT, '"messages":[{"role":"user","content":"', "   "),
    ("/v1/completions", '{"max_tokens":1,', '"prompt":"', "0123456789"),
    ("/v1/completions", '{"max_tokens":1,', '"prompt":[', "9"),
    ("/v1/completions", '{"max_tokens":1,', '"n":128,"prompt":"', "one, two; "),
    ("/v1/responses", '{"max_output_tokens":1,', '"input":[', '{"role":"user","content":"a"}'),
    ("/tokenize", "{", '"return_token_strs":true,"prompt":"', "one, "),
    ("/detokenize", "{", '"tokens":[', "9"),
)
"""A path, the beginning of its bodies, what follows there, and what is repeated after that."""


def body_of(before: str, repeated: str, size: int) -> bytes:
    """Return a body of at most `size` bytes, with all that is left open in `before` closed."""
    closers, quoted = "", False
    for sign in before:
        if sign == '"':
            quoted = not quoted
        elif sign in "[{" and not quoted:
            closers = {"[": "]", "{": "}"}[sign] + closers
        elif sign in "]}" and not quoted:
            closers = closers[1:]
    comma = "" if quoted or repeated == "[" else ","
    after = ('"' if quoted else "" if repeated == "[" else repeated) + closers
    count = (size - len(before) - len(after)) // len(repeated + comma)
    return (before + count * (repeated + comma) + after).encode()


async def _listen(address: str, came: list[float]) -> None:
    """Stream one text after another until cancelled, noting when something came."""
    options = GenerateOptions(max_tokens=CONTEXT - 64, ignore_eos=True, num_speculative_tokens=0)
    async with AsyncClient(address) as client:
        while True:
            async for _ in client.generate("Once upon a time", options):
                came.append(time.perf_counter())


async def _post(port: int, path: str, body: bytes) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            length = f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(f"{head}{length}".encode() + body)
            answer = await reader.read()
            writer.close()
            return answer[9:12].decode()
    except (ConnectionError, TimeoutError) as error:
        return type(error).__name__


async def attack(only: int | None = None) -> tuple[list[Check], FittedTable]:
    """Send every shape, or the one of this number, to a stack with the bundled models.

    Returns a check for each, and for how long the stream waited.
    """
    rows, checks = [], []
    stack_options = StackOptions(**SMALL, max_model_len=CONTEXT, http_port=0)
    async with Stack(stack_options, on_log=say) as stack:
        assert stack.http_url is not None
        port = int(stack.http_url.rpartition(":")[2].strip("/"))
        came: list[float] = []
        listening = asyncio.create_task(_listen(stack.address, came))
        await asyncio.sleep(QUIET_S)
        for number, (path, beginning, before, repeated) in enumerate(SHAPES):
            if only not in (None, number):
                continue
            name = f"{number}: {path} {before}{repeated[:30]}"
            body = body_of(beginning + before, repeated, max_request_bytes(CONTEXT))
            silences, answers = [], Counter[str]()
            for count in (0, 1, AT_ONCE):
                came[:] = [time.perf_counter()]
                rest = asyncio.create_task(asyncio.sleep(QUIET_S))
                sending = (_post(port, path, body) for _ in range(count))
                answers.update(await asyncio.gather(*sending))
                await rest
                silences.append(max(b - a for a, b in pairwise([*came, time.perf_counter()])))
            told = ", ".join(f"{status} {n}" for status, n in answers.items())
            rows.append([name, told, f"{len(body):,}", *(f"{1e3 * s:,.0f}" for s in silences)])
            added = max(silences[1:]) - silences[0]
            said = f"another client waited {added:.2f} s longer, bound {MAX_SILENCE_S:g} s"
            checks.append(Check(name, added <= MAX_SILENCE_S, said))
            say(" | ".join(rows[-1]))
        listening.cancel()
        await asyncio.wait([listening])
    columns = ["body", "answers", "bytes", "silence before, ms", "with one", "with several"]
    return checks, make_table(columns, rows, left=2)
