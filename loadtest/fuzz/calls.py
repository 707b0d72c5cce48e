"""Calls to a server: what is sent step by step, which answers are allowed, and those that came.

To the client every call is a stream, whatever its method is, so a method of one request may get
none or two. A script does not depend on what the server answers, so it can be played again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from flyspec import rpc
from flyspec.v1 import admin_pb2, generation_pb2
from loadtest.fuzz.messages import UNKNOWN, Mutator, Path, mangled, mistake, paths, readable
from loadtest.fuzz.sessions import FILES, Facts, Session, answered, sessions

REFUSED = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE",
                     "ALREADY_EXISTS", "UNIMPLEMENTED"})  # fmt: skip
BLAMELESS = REFUSED | {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
"""Statuses that do not blame the server, whatever the client did."""
NO_ANSWER, WRITE_RACE = "no answer", "ended while written to"
"""`WRITE_RACE`: grpc.aio overwrites a status when a write meets the end (grpc/grpc#36066)."""
KINDS = {
    "valid": 8, "an unknown field added": 4, "fields changed": 54, "bytes changed": 14,
    "a message dropped": 2, "a message doubled": 4, "messages reordered": 3, "cut short": 2,
    "mixed with another session": 3, "cancelled": 4, "its deadline passes": 2,
}  # fmt: skip
"""Changes to a session, by frequency."""
OWN_WEIGHT = 4
"""Frequency of a field of the server's own methods, as a multiple of one of gRPC's."""
MAX_TOKENS, MAX_WAIT_MS, PATIENCE_S = 50, 200, 3.0
"""Bounds of what a request may cost, so that nobody waits long for one that is valid."""


class Method(NamedTuple):
    """A method of a service, which takes a stream of requests or one."""

    path: str
    request: type[Message]
    response: type[Message]
    streams: bool


def methods_of(*files: FileDescriptor) -> list[Method]:
    """Return the methods of all services in these files."""
    return [
        Method(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type),
               GetMessageClass(method.output_type), method.client_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]  # fmt: skip


SYSTEM = methods_of(health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
NOWHERE = SYSTEM[0]._replace(path="/flyspec.v1.Nothing/At/All")


class Do(Enum):
    """A step that sends nothing."""

    READ = "read"
    CANCEL = "cancel"


Step = bytes | Do | float
"""A message to send, something else to do, or seconds to wait."""
PAUSE_S = 0.005


@dataclass(frozen=True)
class Script:
    """A call: its steps, and the statuses that are `allowed`.

    `min_answers` are due if it ends with OK. `deadline_s` is the client's.
    """

    method: Method
    kind: str
    steps: tuple[Step, ...]
    allowed: frozenset[str] = BLAMELESS
    min_answers: int = 0
    deadline_s: float | None = None

    @cached_property
    def expects(self) -> frozenset[str]:
        """The statuses that may end it; of what is known to be wrong, refusals."""
        late = {"DEADLINE_EXCEEDED"} if self.deadline_s is not None else set()
        sent = [readable(self.method.request, s) for s in self.steps if isinstance(s, bytes)]
        heard = sent if self.method.streams else sent[:1]
        wrong = any(message is None or mistake(message) for message in heard)
        refused = wrong and Do.CANCEL not in self.steps
        return (REFUSED if refused else self.allowed) | late | {"RESOURCE_EXHAUSTED", WRITE_RACE}

    def __str__(self) -> str:
        lines = [f"{self.method.path} ({self.kind}; expects {', '.join(sorted(self.expects))})"]
        for step in self.steps:
            if isinstance(step, bytes):
                sent = readable(self.method.request, step)
                text = f"send {step.hex() if sent is None else ' '.join(str(sent).split())}"
            else:
                text = step.value if isinstance(step, Do) else f"wait {step} s"
            lines.append(f"  {text[:300]}{' ...' if len(text) > 300 else ''}")
        return "\n".join(lines)


class ScriptSource:
    """Makes scripts for the server of this name: sessions of its methods, changed."""

    def __init__(self, name: str, facts: Facts) -> None:
        known, self._own = list(sessions(name, facts)), methods_of(FILES[name])
        self.sessions: dict[Method, list[Session]] = {
            method: [s for s in known if isinstance(s[0], method.request)] or [[method.request()]]
            for method in (*self._own, *SYSTEM, NOWHERE)
        }
        self._paths: dict[Method, list[Path]] = defaultdict(list)
        for method in self.sessions:
            self._paths[method] = list(paths(method.request.DESCRIPTOR))
        self._weights = [
            max(1, len(self._paths[method])) * (OWN_WEIGHT if method in self._own else 1)
            for method in self.sessions
        ]
        numbers = (facts.vocab_size, facts.context_length, facts.max_drafts)
        self._mutator = Mutator(numbers, (*facts.rules, *facts.drafters))
        # An operator's request meets whatever state others left, and drafters that do not answer.
        self._by_state = frozenset({"UNAVAILABLE"} if name == "admin" else ())

    def script(self, rng: Random) -> Script:
        """Return the script that this generator leads to."""
        (method,) = rng.choices([*self.sessions], self._weights)
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        session, own = rng.choice(self.sessions[method]), method in self._own
        other = rng.choice(self.sessions[method])
        data, at = [message.SerializeToString() for message in session], rng.randrange(len(session))
        changed = at  # the first message that is not as it should be
        allowed, answers, end = BLAMELESS | self._by_state, 0, list[Step]()
        deadline_s = 0.2 if method.path.endswith("/Watch") else None
        match kind:
            case "valid" | "an unknown field added":
                if kind != "valid":
                    data[at] += rng.choice(UNKNOWN)
                changed, answers = len(data), sum(map(answered, session)) or 1
                if not self._by_state:  # grpc's own services do not implement everything
                    allowed = frozenset({"OK"} if own else {"OK", "UNIMPLEMENTED"})
            case "fields changed":
                data[at] = self._changed(method, data[at], rng)
            case "bytes changed":
                data[at] = mangled(data[at], other[-1].SerializeToString(), rng)
            case "a message dropped":
                del data[at]
            case "a message doubled":
                data.insert(at, data[at])
            case "messages reordered":
                rng.shuffle(data)
                changed = 0
            case "cut short":
                del data[at + 1 :]
            case "mixed with another session":
                data[at] = other[at % len(other)].SerializeToString()
            case "its deadline passes":
                deadline_s = rng.choice((0.001, 0.01, 0.05))
            case _:
                del data[at + 1 :]
                end = [Do.CANCEL]
        # A session's messages come once and in order, the opening first.
        wrong = kind == "a message doubled" or (kind == "a message dropped" and data and not at)
        if wrong and method.streams and own:
            allowed = REFUSED
        steps: list[Step] = []
        paced, pauses = rng.random() < 0.6, rng.random() < 0.5
        for index, encoded in enumerate(data):
            affordable, costly = _affordable(method, encoded, rng)
            deadline_s = PATIENCE_S if costly and deadline_s is None else deadline_s
            steps.append(affordable)
            # To wait for an answer to a message that is changed might take for ever.
            if paced and index < min(changed, len(session)) and answered(session[index]):
                steps.append(Do.READ)
            elif pauses and index == changed:
                steps.append(PAUSE_S)
        return Script(method, kind, (*steps, *end), allowed, answers, deadline_s)

    def _changed(self, method: Method, data: bytes, rng: Random) -> bytes:
        message, known = method.request.FromString(data), self._paths[method]
        for _ in range(rng.choice((1, 1, 1, 2, 4)) if known else 0):
            self._mutator.change(message, rng.choice(known), rng)
        return message.SerializeToString()


def _affordable(method: Method, data: bytes, rng: Random) -> tuple[bytes, bool]:
    """Return a message that ends no run and takes little time, and whether it may take long."""
    match message := readable(method.request, data):
        case generation_pb2.GenerateRequest():
            if message.HasField("max_tokens") and message.max_tokens <= MAX_TOKENS:
                return data, False
            if rng.random() < 0.1:
                return data, True
            message.max_tokens = 3
        case admin_pb2.RegisterDrafterRequest():  # its address may lead nowhere
            return data, True
        case admin_pb2.DrainDrafterRequest() if message.wait_ms > MAX_WAIT_MS:
            message.wait_ms = MAX_WAIT_MS
        case admin_pb2.DrainRequest():
            message.resume = True
        case _:
            return data, False
    return message.SerializeToString(), False


@dataclass
class CallOutcome:
    """The end of a call, and the messages sent until then."""

    script: Script
    status: str = NO_ANSWER
    details: str = ""
    sent: int = 0
    answers: list[bytes] = field(default_factory=list)

    @property
    def complaint(self) -> str:
        """The fault of it; empty if there is none."""
        # A session may name the target that it is for, and is sent away by another one.
        elsewhere = self.status == "UNAVAILABLE" and self.details.startswith("open.")
        if self.status not in self.script.expects and not elsewhere:
            return f"status {self.status}: {self.details}"
        if self.status == "OK" and len(self.answers) < self.script.min_answers:
            return f"{len(self.answers)} answers instead of {self.script.min_answers}"
        if (
            self.status in REFUSED
            and self.script.method.path.startswith("/flyspec.")
            and not self.details
        ):
            return f"status {self.status} without a message"
        return ""


async def play(channel: grpc.aio.Channel, script: Script, patience_s: float) -> CallOutcome:
    """Do what the script says; never raises for what the server does."""
    call = channel.stream_stream(script.method.path)(timeout=script.deadline_s)
    outcome = CallOutcome(script)
    try:
        async with asyncio.timeout(patience_s):
            with suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await _play(call, outcome)
            code, outcome.details = await call.code(), await call.details() or ""
            raced = code is grpc.StatusCode.INTERNAL and outcome.details == rpc.WRITE_FAILED
            outcome.status = WRITE_RACE if raced else code.name
    except TimeoutError:
        pass
    finally:
        call.cancel()
    return outcome


async def _play(call: Any, outcome: CallOutcome) -> None:
    try:
        for step in outcome.script.steps:
            if call.done():
                return
            match step:
                case bytes():
                    outcome.sent += 1
                    await call.write(step)
                case Do.READ:
                    if (answer := await call.read()) is grpc.aio.EOF:
                        return
                    outcome.answers.append(answer)
                case float():
                    await asyncio.sleep(step)
                case Do.CANCEL:
                    call.cancel()
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            outcome.answers.append(answer)
    except asyncio.CancelledError:
        # The call was cancelled, by its deadline for example; or this task was.
        task = asyncio.current_task()
        if not call.done() or task is None or task.cancelling():
            raise
