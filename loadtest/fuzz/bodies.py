"""Does any body that the limits let in hold up other clients? `python -m loadtest.fuzz.bodies`.

A client streams while bodies of the maximum size, of every shape that costs much to read, are sent
to each face of the orchestrator: one at a time, then several at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import grpc
import uvloop

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.flags import Flag
from flyspec.rpc import max_request_bytes
from flyspec.tables import make_table
from flyspec_lab.report import PageResults, Report
from loadtest.report import VERSION, checked_report

CONTEXT, MAX_SILENCE_S, PATIENCE_S = 4096, 0.2, 300.0
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE = "/flyspec.v1.GenerationService/Generate"


class Shape(NamedTuple):
    """A body: `repeated` between `before` and `after` as often as it fits."""

    name: str
    path: str
    before: bytes
    repeated: bytes
    after: bytes

    def of(self, size: int) -> bytes:
        """Return a body of at most `size` bytes."""
        count = (size - len(self.before) - len(self.after)) // len(self.repeated)
        return self.before + count * self.repeated + self.after


def _chat(name: str, field: str, repeated: str, last: str, after: str = "]") -> Shape:
    """Return a chat with `field` (up to where the items begin) and its items."""
    said = '{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],'
    return Shape(f"chat: {name}", CHAT, (said + field).encode(), repeated.encode(),
                 f"{last}{after}}}".encode())  # fmt: skip


SHAPES = (
    _chat("drafts a round", '"speculation":{"num_draft_tokens_per_round":[', "1,", "1", "]}"),
    _chat("phases", '"speculation":{"phases":[', "{},", "{}", "]}"),
    _chat("texts of a phase", '"speculation":{"phases":[{"until":[', '"",', '""', "]}]}"),
    _chat("lists in lists", '"speculation":{"phases":[', "[],", "[]", "]}"),
    _chat("nested", '"speculation":{"phases":', "[", "", ""),
    _chat("stop strings", '"stop":[', '"a",', '"a"'),
    _chat("stop tokens", '"stop_token_ids":[', "1,", "1"),
    _chat("biases", '"logit_bias":{', '"1":1,', '"1":1', "}"),
    _chat("tools", '"tools":[', "{},", "{}"),
    _chat("a tool's schema",
          '"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
          '"a",', '"a"', "]}}}]"),
    _chat("documents", '"documents":[', '{"a":{}},', "{}"),
    _chat("metadata", '"metadata":{', '"a":[],', '"b":1', "}"),
    _chat("variables", '"chat_template_kwargs":{', '"a":{},', '"b":1', "}"),
    _chat("a prediction", '"prediction":{"type":"content","content":"', "one two ", "", '"}'),
    _chat("parts of one", '"prediction":{"type":"content","content":[',
          '{"type":"text","text":""},', '{"type":"text","text":""}', "]}"),
    _chat("unknown parameters", '"frobnicate":[', "{},", "{}"),
    _chat("long integers", '"stop_token_ids":[', "9" * 4200 + ",", "1"),
    _chat("escaped text", '"user":"', "\\\"", "", '"'),
    Shape("chat: messages", CHAT, b'{"max_tokens":1,"messages":[',
          b'{"role":"","content":""},', b'{"role":"","content":""}]}'),
    Shape("chat: messages that are none", CHAT, b'{"messages":[', b"{},", b"{}]}"),
    Shape("chat: parts", CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":[',
          b'{"type":"text","text":""},', b'{"type":"text","text":"a"}]}]}'),
    Shape("chat: words", CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"',
          b"one, two; ", b'"}]}'),
    Shape("chat: spaces", CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"',
          b"   ", b'"}]}'),
    Shape("completion: digits", TEXT, b'{"max_tokens":1,"prompt":"', b"0123456789", b'"}'),
    Shape("completion: token ids", TEXT, b'{"max_tokens":1,"prompt":[', b"9,", b"9]}"),
    Shape("completion: prompts", TEXT, b'{"max_tokens":1,"prompt":[', b"[9],", b"[9]]}"),
    Shape("completion: 128 choices", TEXT, b'{"max_tokens":1,"n":128,"prompt":"',
          b"one, two; ", b'"}'),
    Shape("response: items", RESPONSES, b'{"max_output_tokens":1,"input":[',
          b'{"role":"user","content":""},', b'{"role":"user","content":"a"}]}'),
    Shape("response: tools", RESPONSES, b'{"max_output_tokens":1,"input":"a","tools":[',
          b'{"type":"function","name":"f"},', b'{"type":"function","name":"f"}]}'),
    Shape("tokenize: a text", "/tokenize", b'{"return_token_strs":true,"prompt":"', b"one, ",
          b'"}'),
    Shape("tokenize: messages", "/tokenize", b'{"messages":[', b'{"role":""},', b'{"role":""}]}'),
    Shape("detokenize", "/detokenize", b'{"tokens":[', b"9,", b"9]}"),
)  # fmt: skip


def _field(number: int, data: bytes) -> bytes:
    """Return a protobuf field of that number with bytes, a text, a message or packed numbers."""
    out, size = bytearray([number << 3 | 2]), len(data)
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + data


_TEXT, _SPECULATION = _field(1, b"a") + b"\x30\x01", 9
MESSAGES: Sequence[tuple[str, Callable[[int], bytes]]] = (
    ("messages", lambda size: b"\x30\x01" + _field(3, size // 2 * b"\x0a\x00")),
    ("messages with a role",
     lambda size: b"\x30\x01" + _field(3, size // 5 * _field(1, b"\x0a\x01a"))),
    ("phases", lambda size: _TEXT + _field(_SPECULATION, size // 2 * b"\x5a\x00")),
    ("texts of a phase",
     lambda size: _TEXT + _field(_SPECULATION, _field(11, size // 2 * b"\x12\x00"))),
    ("drafts a round", lambda size: _TEXT + _field(_SPECULATION, _field(10, size * b"\x01"))),
    ("speculations", lambda size: _TEXT + size // 2 * b"\x4a\x00"),
    ("stop strings", lambda size: _TEXT + size // 2 * b"\x3a\x00"),
    ("token ids", lambda size: b"\x30\x01" + _field(2, _field(1, size * b"\x09"))),
    ("a prediction's ids", lambda size: _TEXT + _field(14, size * b"\x09")),
    ("tools", lambda size: b"\x30\x01" + _field(
        3, _field(1, b"\x0a\x01a") + _field(2, b"[" + size // 3 * b"{}," + b"{}]"))),
    ("fields of a message", lambda size: b"\x30\x01" + _field(
        3, _field(1, b"\x0a\x01a" + _field(3, b'{"a":[' + size // 3 * b"[]," + b"1]}")))),
    ("a text", lambda size: _field(1, size // 10 * b"0123456789") + b"\x30\x01"),
)  # fmt: skip
"""Requests of `Generate` of about that many bytes."""


# fmt: off
@dataclass(frozen=True)
class BodyOptions:
    """Attacks to send, and options of the run."""

    at_once: Annotated[int, Flag("Bodies that are sent at once.", min=1)] = 6
    quiet_s: Annotated[float, Flag("Seconds without an attack before each.", min=1)] = 3.0
    only: Annotated[str, Flag("Only shapes with this in their names.")] = ""
    # fmt: on


class Listener:
    """A client that streams one text after another, and when something came."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._came = time.perf_counter()
        self._longest = 0.0

    async def run(self) -> None:
        """Stream until cancelled."""
        options = GenerateOptions(
            max_tokens=CONTEXT - 64, ignore_eos=True, num_speculative_tokens=0
        )
        async with AsyncClient(self._address) as client:
            while True:
                async for _ in client.generate("Once upon a time", options):
                    self._look()
                    self._came = time.perf_counter()

    def _look(self) -> None:
        self._longest = max(self._longest, time.perf_counter() - self._came)

    def longest_silence_s(self) -> float:
        """Return the longest time without a chunk since it was asked last."""
        self._look()
        longest, self._longest = self._longest, 0.0
        return longest


class Result(NamedTuple):
    """The longest silences before, during one body, and during several; and the answers."""

    name: str
    size: int
    quiet_s: float
    alone_s: float
    together_s: float
    answers: dict[str, int]

    @property
    def passed(self) -> bool:
        return max(self.alone_s, self.together_s) <= self.quiet_s + MAX_SILENCE_S


Send = Callable[[], Coroutine[Any, Any, str]]


async def _post(port: int, path: str, body: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    with suppress(ConnectionError):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        answer = await reader.read()
        writer.close()
        return answer[9:12].decode()
    return "cut"


async def _call(channel: grpc.aio.Channel, body: bytes) -> str:
    try:
        async for _ in channel.unary_stream(GENERATE)(body):
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _patient(send: Send) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await send()
    except TimeoutError:
        return "late"


def _attacks(only: str, size: int, port: int, channel: Any) -> Iterator[tuple[str, int, Send]]:
    """Yield name, size and a function that sends, one after another: bodies are large."""
    for shape in SHAPES:
        if only in shape.name:
            body = shape.of(size)
            yield shape.name, len(body), lambda: _post(port, shape.path, body)  # noqa: B023
    for name, make in MESSAGES:
        if only in (name := f"gRPC: {name}"):
            message = make(size - 64)
            yield name, len(message), lambda: _call(channel, message)  # noqa: B023


async def attack(options: BodyOptions) -> list[Result]:
    """Send every shape to a stack with the bundled models."""
    stack_options = StackOptions(
        device="cpu", dtype="float32", draft_dtype="float32", threads=1, draft_threads=1,
        max_model_len=CONTEXT, log_level="warning", http_port=0,
    )  # fmt: skip
    results = []
    async with (
        Stack(stack_options, on_log=say) as stack,
        grpc.aio.insecure_channel(stack.address) as channel,
    ):
        assert stack.http_url is not None
        port = int(stack.http_url.rpartition(":")[2].strip("/"))
        listener = Listener(stack.address)
        listening = asyncio.create_task(listener.run())
        await asyncio.sleep(options.quiet_s)
        size = max_request_bytes(CONTEXT)
        for name, sent, send in _attacks(options.only, size, port, channel):
            silences, answers = [], Counter[str]()
            for count in (0, 1, options.at_once):
                listener.longest_silence_s()
                rest = asyncio.create_task(asyncio.sleep(options.quiet_s))
                answers.update(await asyncio.gather(*(_patient(send) for _ in range(count))))
                await rest
                silences.append(listener.longest_silence_s())
            quiet, alone, together = silences
            results.append(result := Result(name, sent, quiet, alone, together, dict(answers)))
            say(" | ".join(_row(result)))
        listening.cancel()
        await asyncio.wait([listening])
    return results


def _row(result: Result) -> list[str]:
    silences = (result.quiet_s, result.alone_s, result.together_s)
    answers = ", ".join(f"{status} {n}" for status, n in result.answers.items())
    return [result.name, answers, f"{result.size:,}", *(f"{1e3 * s:,.0f}" for s in silences)]


def bodies_report(results: Sequence[Result], options: BodyOptions) -> Report:
    """Return the report on a run with these options."""
    longest = f"at most {MAX_SILENCE_S:g} s longer than without"
    checks = [
        {"name": r.name, "passed": r.passed, "said": f"another client's silence: {longest}"}
        for r in results
    ]
    document: dict[str, Any] = {
        "version": VERSION, "passed": all(r.passed for r in results),
        "results": [r._asdict() for r in results], "checks": checks, "warnings": [],
        "options": asdict(options),
    }  # fmt: skip
    columns = ["body", "answers", "bytes", "silence before, ms", "with one", "with several"]
    title = "longest silence of another client's stream"
    table = make_table(columns, map(_row, results), title, left=2)
    return checked_report(document, "flyspec bodies", [table])


@with_flags
def bodies(options: BodyOptions, results: PageResults) -> None:
    """Send bodies that cost much to read, while another client streams.

    Starts the stack with the bundled models. The exit code is 1 if its stream is silent for more
    than 0.2 s longer than without them.
    """
    results.of(lambda: bodies_report(uvloop.run(attack(options)), options))


if __name__ == "__main__":
    run(single(bodies))
