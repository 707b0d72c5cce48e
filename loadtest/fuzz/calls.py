"""What is sent in one call, step by step, how the server took it, and the smallest part of it.

To the client every call is a stream, whatever its method is, so a method of one request may get
none or two. A script does not depend on what the server answers: all or part of it can be replayed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from flyspec import rpc
from loadtest.fuzz.mutate import is_map, mistake, places, readable

OK = frozenset({"OK"})
REFUSED = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE",
                     "ALREADY_EXISTS", "UNIMPLEMENTED"})  # fmt: skip
BLAMELESS = REFUSED | OK | {"CANCELLED", "DEADLINE_EXCEEDED"}
"""Statuses that do not blame the server, whatever the client did."""
NO_ANSWER, WRITE_RACE = "no answer", "ended while written to"
"""`WRITE_RACE`: grpc.aio overwrites a status when a write meets the end (grpc/grpc#36066)."""
ALWAYS = frozenset({"RESOURCE_EXHAUSTED", WRITE_RACE})


class Method(NamedTuple):
    """A method of a service, which takes a stream of requests or one."""

    path: str
    request: type[Message]
    response: type[Message]
    streams: bool


def methods_of(*files: FileDescriptor) -> list[Method]:
    """The methods of all services in these files."""
    return [
        Method(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type),
               GetMessageClass(method.output_type), method.client_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]  # fmt: skip


class Do(Enum):
    """A step that sends nothing."""

    READ = "read"
    PAUSE = "pause"
    CANCEL = "cancel"
    LEAVE = "wait"


Step = bytes | Do


@dataclass(frozen=True)
class Script:
    """A call: steps, each an encoded message or `Do`, and the statuses that are `allowed`.

    It ends with a half-close unless `CANCEL` ends it, or `LEAVE` leaves that to the server.
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
        return (REFUSED if refused else self.allowed) | ALWAYS | late

    def __str__(self) -> str:
        lines = [f"{self.method.path} ({self.kind}; expects {', '.join(sorted(self.expects))})"]
        for step in self.steps:
            if isinstance(step, Do):
                text = step.value
            else:
                message = readable(self.method.request, step)
                text = "send " + (step.hex() if message is None else " ".join(str(message).split()))
            lines.append(f"  {text[:300]}{' ...' if len(text) > 300 else ''}")
        return "\n".join(lines)


@dataclass
class CallOutcome:
    """How a call ended, and what was sent until then."""

    script: Script
    status: str = NO_ANSWER
    details: str = ""
    sent: int = 0
    answers: list[bytes] = field(default_factory=list)

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty if nothing is."""
        # A session may name the target that it is for, and is sent away by another one.
        elsewhere = self.status == "UNAVAILABLE" and self.details.startswith("open.")
        if self.status not in self.script.expects and not elsewhere:
            return f"status {self.status}: {self.details}"
        if self.status == "OK" and len(self.answers) < self.script.min_answers:
            return f"{len(self.answers)} answers instead of {self.script.min_answers}"
        ours = self.script.method.path.startswith("/flyspec.")
        if self.status in REFUSED and ours and not self.details:
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
                case Do.PAUSE:
                    await asyncio.sleep(0.005)
                case Do.CANCEL:
                    call.cancel()
        if Do.LEAVE not in outcome.script.steps:
            await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            outcome.answers.append(answer)
    except asyncio.CancelledError:
        # The call was cancelled, by its deadline for example; or this task was.
        task = asyncio.current_task()
        if not call.done() or task is None or task.cancelling():
            raise


async def shrunk(
    script: Script, shows: Callable[[Script], Awaitable[bool]], seconds: float
) -> Script | None:
    """The smallest part of the script found that `shows`; None if not even all of it does."""
    if not await shows(script):
        return None
    deadline, smaller = time.monotonic() + seconds, _parts(script)
    while (part := next(smaller, None)) and time.monotonic() < deadline:
        if await shows(part):
            script, smaller = part, _parts(part)
    return script


def beginnings(script: Script) -> Iterator[Script]:
    """The script without ever more of its last steps."""
    for end in range(len(script.steps) - 1, 0, -1):
        yield _part(script, script.steps[:end])


def _part(script: Script, steps: tuple[Step, ...]) -> Script:
    # Of a part it is not known whether it is right, and how many answers are due.
    return replace(script, steps=steps, allowed=script.allowed | BLAMELESS, min_answers=0)


def _parts(script: Script) -> Iterator[Script]:
    """The script without some of its steps, or with less in one of its messages."""
    steps, size = script.steps, len(script.steps) // 2
    while size:
        for at in range(0, len(steps), size):
            yield _part(script, (*steps[:at], *steps[at + size :]))
        size //= 2
    for at, step in enumerate(steps):
        for less in _less(script.method.request, step) if isinstance(step, bytes) else ():
            yield _part(script, (*steps[:at], less, *steps[at + 1 :]))


def _less(cls: type[Message], data: bytes) -> Iterator[bytes]:
    """A message without one of its fields, or with half of a list; bytes that are none, halved."""
    if (whole := readable(cls, data)) is None:
        half = len(data) // 2
        yield from (data[:half], data[half:]) if half else ()
        return
    for index, (owner, place) in enumerate(places(whole)):
        listed = place.is_repeated and not is_map(place)
        half = len(getattr(owner, place.name)) // 2 if listed else 0
        for cut in (None, slice(half), slice(half, None)) if half else (None,):
            message = cls.FromString(data)
            part, _ = list(places(message))[index]
            if cut is None:
                part.ClearField(place.name)
            else:
                del getattr(part, place.name)[cut]
            if len(less := message.SerializeToString()) < len(data):
                yield less
