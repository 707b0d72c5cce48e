"""Draft and verify service under attack, each with a canary: a session that must not notice.

The canary's sequence and answers are recorded before anything else is sent. It asks for them again
all the time, in a session that stays open and in new ones, and must get them, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from tokenizers import Tokenizer as RustTokenizer

from bench.fuzz.draft import DraftSource
from bench.fuzz.facts import Facts, ScriptSource
from bench.fuzz.verify import VerifySource
from flyspec import wire
from flyspec.cli.service import Child
from flyspec.cli.stack import DEMO_MODELS
from flyspec.rules import Rule
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, ProcessInfo, VerifyServiceInfo
from flyspec.values.rounds import DraftAdvance, DraftOpen, Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams

IDLE_TIMEOUT_S = 20.0
MAX_SESSIONS = 48
CONTEXT = 1024
COUNT = 8
PROMPTS = (
    "def total(values):\n    result = 0\n    for value in values:\n        result",
    "A farmer has 12 cows and buys 7 more. How many cows does the farmer have now?",
    "The cat sat on the mat, and the dog sat on the log while the cat saw the dog.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
)


class WrongAnswerError(Exception):
    """The canary got other tokens than before."""


class FuzzTarget(Protocol):
    """A server under attack, and how it is looked at from beside."""

    services: list[Child]
    address: str
    facts: Facts
    source: ScriptSource

    async def start(self, on_log: Callable[[str], None]) -> None:
        """Start it and record what the canary must get."""

    async def check(self) -> None:
        """One round of the canary's. Raises `WrongAnswerError`, or what gRPC raises."""

    async def state(self) -> tuple[dict[str, int], list[ProcessInfo]]:
        """What is held: sessions by service, the canary's among them; and by which processes."""

    def renew(self) -> None:
        """Open what the canary keeps open anew, when it has failed."""

    async def leave(self) -> None:
        """Let the canary go."""

    async def stop(self) -> None:
        """End it."""


class _Single:
    """What both services have in common."""

    module = ""
    _stub: Any
    _kept: _Stream
    _prompt: list[int]
    _expected: list[int]

    def __init__(self) -> None:
        self.services: list[Child] = []
        self._round_id = 0

    async def _spawn(self, model: str, on_log: Callable[[str], None]) -> str:
        """Start the service as a child; its address."""
        flags = [
            "--model", str(DEMO_MODELS / model), "--port", "0", "--device", "cpu", "--dtype",
            "float32", "--threads", "1", "--max-sessions", str(MAX_SESSIONS), "--max-model-len",
            str(CONTEXT), "--idle-timeout-s", str(IDLE_TIMEOUT_S), "--log-level", "warning",
        ]  # fmt: skip
        service = await Child.start(self.module.split("_")[0], self.module, flags, 1, on_log)
        self.services.append(service)
        await service.ready()
        return f"127.0.0.1:{service.facts['port']}"

    async def _record(self, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
        """The sequences that make sense; the last one is the canary's, whose session stays open."""
        texts: list[tuple[int, ...]] = []
        for prompt in PROMPTS:
            if texts:
                await self._kept.close()
            self._prompt = encode(prompt)
            self._kept = self._open()
            self._expected = await self._continue(self._kept)
            texts.append((*self._prompt, *self._expected))
        return tuple(texts)

    async def check(self) -> None:
        """The canary's answers in the open session; the same in a new one."""
        new = self._open()
        for stream in (self._kept, new):
            if (got := await self._continue(stream)) != self._expected:
                raise WrongAnswerError(f"got {got} instead of {self._expected}")
            await self._check_more(stream)
        await new.close()

    async def state(self) -> tuple[dict[str, int], list[ProcessInfo]]:
        """Its sessions and its process."""
        info = await self._describe()
        return {f"{self.module.split('_')[0]} sessions": info.sessions.active}, [info.process]

    def renew(self) -> None:
        """Open the canary's session anew."""
        self._kept = self._open()

    async def leave(self) -> None:
        """Let the canary go."""
        with contextlib.suppress(WrongAnswerError):
            await self._kept.close()

    async def stop(self) -> None:
        """End it."""
        await self._channel.close()
        for service in self.services:
            service.send(signal.SIGTERM)
            await service.ended()

    def _connect(self, address: str) -> grpc.aio.Channel:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address)
        return self._channel

    async def _describe(self) -> Any:
        """What the service says of itself."""
        raise NotImplementedError

    def _open(self) -> _Stream:
        raise NotImplementedError

    async def _continue(self, stream: _Stream) -> list[int]:
        """Tokens that follow the prompt."""
        raise NotImplementedError

    async def _check_more(self, stream: _Stream) -> None:
        """Raise `WrongAnswerError` if anything else is not as it should be."""


class _Stream:
    """A canary's session: a call, and the message that opens it at the first round."""

    def __init__(self, call: Any, opening: Any) -> None:
        self._call, self._opening = call, opening

    async def ask(self, message: Any) -> list[Any]:
        """Send a message and read to the last answer."""
        try:
            if self._opening is not None:
                await self._call.write(self._opening)
                self._opening = None
            await self._call.write(message)
        except asyncio.InvalidStateError:
            pass  # it has ended; why is told below
        answers = [await self._read()]
        while not answers[-1].last:
            answers.append(await self._read())
        return answers

    async def close(self) -> None:
        """End the session, as a client does."""
        await self._call.done_writing()
        if (code := await self._call.code()) is not grpc.StatusCode.OK:
            raise WrongAnswerError(f"ended with {code.name}: {await self._call.details()}")

    async def _read(self) -> Any:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise WrongAnswerError(
                f"ended with {(await self._call.code()).name}: {await self._call.details()}"
            )
        return message


class VerifyTarget(_Single):
    """The verify service."""

    module = "verify_service"

    async def start(self, on_log: Callable[[str], None]) -> None:
        """Start it, and `attach`."""
        await self.attach(await self._spawn("target", on_log))

    async def attach(self, address: str) -> None:
        """Read its tokenizer, and decode what the canary must get."""
        self._stub = verify_pb2_grpc.VerifyServiceStub(self._connect(address))
        messages = [m async for m in self._stub.GetTokenizer(verify_pb2.GetTokenizerRequest())]
        texts = await self._record(Tokenizer(wire.tokenizer_of(messages)).encode)
        model = (await self._describe()).model
        self.facts = Facts(model.vocab_size, model.context_length, 64, 64, texts)
        self.source: ScriptSource = VerifySource(self.facts)

    async def _check_more(self, stream: _Stream) -> None:
        """A round of right drafts."""
        drafts = self._expected[:-1]
        (verdict,) = await self._round(stream, drafts)
        stands = verdict.keep_length - len(self._prompt)
        if stands != len(drafts) or verdict.next_token_id != self._expected[-1]:
            raise WrongAnswerError(
                f"{stands} of {len(drafts)} right drafts stand, then {verdict.next_token_id}"
            )

    async def _describe(self) -> VerifyServiceInfo:
        answer = await self._stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
        return wire.decode(VerifyServiceInfo, answer)

    def _open(self) -> _Stream:
        open_ = VerifyOpen(
            self._prompt, len(self._prompt), Rule("exact"), SamplingParams(min_tokens=99), 1
        )
        return _Stream(self._stub.Verify(), wire.encode(open_))

    async def _continue(self, stream: _Stream) -> list[int]:
        return [v.next_token_id for v in await self._round(stream, [])]

    async def _round(self, stream: _Stream, drafts: list[int]) -> list[Verdict]:
        self._round_id += 1
        round_ = VerifyRound(self._round_id, len(self._prompt), [], drafts, max_plain_tokens=COUNT)
        answers = await stream.ask(wire.encode(round_))
        return [wire.decode(Verdict, answer) for answer in answers]


class DraftTarget(_Single):
    """The draft service."""

    module = "draft_service"

    async def start(self, on_log: Callable[[str], None]) -> None:
        """Start it, and `attach`."""
        tokenizer = (DEMO_MODELS / "draft" / "tokenizer.json").read_bytes()
        await self.attach(await self._spawn("draft", on_log), tokenizer)

    async def attach(self, address: str, tokenizer_json: bytes) -> None:
        """Draft what the canary must get; the tokenizer is the draft model's."""
        self._stub = draft_pb2_grpc.DraftServiceStub(self._connect(address))
        tokenizer = RustTokenizer.from_buffer(tokenizer_json)
        texts = await self._record(lambda prompt: tokenizer.encode(prompt).ids)
        info = await self._describe()
        model = info.drafters[0].model
        assert model is not None
        self.facts = Facts(
            model.vocab_size, model.context_length, info.max_speculative_tokens, 0, texts,
            tuple(d.name for d in info.drafters),
        )  # fmt: skip
        self.source: ScriptSource = DraftSource(self.facts)

    async def _describe(self) -> DraftServiceInfo:
        answer = await self._stub.Describe(draft_pb2.DraftServiceDescribeRequest())
        return wire.decode(DraftServiceInfo, answer)

    def _open(self) -> _Stream:
        open_ = DraftOpen(self._prompt, SamplingParams(min_tokens=99), 1)
        return _Stream(self._stub.Draft(), wire.encode(open_))

    async def _continue(self, stream: _Stream) -> list[int]:
        self._round_id += 1
        advance = DraftAdvance(self._round_id, len(self._prompt), [], COUNT)
        answers = await stream.ask(wire.encode(advance))
        return [token for answer in answers for token in answer.token_ids]
