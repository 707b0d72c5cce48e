"""What is sent on one call, step by step, and how the server took it.

Every call is a stream for the client, whatever the method is: so a unary method may get no message
or two. A script depends on nothing that the server says, so that it can be played again, or a part.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import grpc

from flyspec import rpc

PATIENCE_S = 60.0

BLAMELESS = frozenset(
    {
        "OK", "CANCELLED", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE",
        "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "ALREADY_EXISTS",
    }
)  # fmt: skip
"""Statuses with which a server may answer whatever a client does."""
INVALID = frozenset({"INVALID_ARGUMENT"})
PREFIX = frozenset({"FAILED_PRECONDITION"})
NOT_FOUND = frozenset({"NOT_FOUND"})
FINE = frozenset({"OK"})
NO_ANSWER = "no answer"
WRITE_RACE = "ended while written to"
"""grpc.aio overwrites the status when a write meets the end of a stream (grpc/grpc#36066)."""
LEFT = "left open"
ALWAYS = frozenset({"RESOURCE_EXHAUSTED", WRITE_RACE, LEFT})


class Do(Enum):
    """What a step does."""

    SEND = "send"
    READ = "read"
    PAUSE = "pause"
    CANCEL = "cancel"
    LEAVE = "leave open"


@dataclass(frozen=True)
class Action:
    """One step; `label` says in words what is sent."""

    do: Do
    data: bytes = b""
    label: str = ""


@dataclass(frozen=True)
class Script:
    """A call: its method, steps, the statuses that may end it, and `kind` for the table.

    Without `CANCEL` or `LEAVE` it ends with a half-close and reads what still comes. `min_answers`
    are due if it ends with OK. `deadline_s` is the client's.
    """

    method: str
    steps: tuple[Action, ...]
    kind: str
    expects: frozenset[str] = BLAMELESS
    min_answers: int = 0
    deadline_s: float | None = None

    @property
    def num_messages(self) -> int:
        """Messages that it sends if nothing stops it."""
        return sum(step.do is Do.SEND for step in self.steps)

    def only(self, steps: list[Action]) -> Script:
        """A part of it, of which nothing is known but that no status may blame the server."""
        return replace(self, steps=tuple(steps), expects=BLAMELESS, min_answers=0)

    def __str__(self) -> str:
        lines = [f"{self.method} ({self.kind}; expects {', '.join(sorted(self.expects))})"]
        for step in self.steps:
            data = step.data.hex() if len(step.data) < 200 else f"{len(step.data)} bytes"
            lines.append(f"  {step.do.value:6} {step.label} {data}".rstrip())
        return "\n".join(lines)


@dataclass
class CallOutcome:
    """How a call ended, and what was sent until then."""

    script: Script
    status: str
    details: str = ""
    sent: int = 0
    answers: int = 0
    call: Any = field(default=None, repr=False)

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty if nothing is."""
        expects = self.script.expects | ALWAYS
        if self.script.deadline_s is not None:
            expects |= {"DEADLINE_EXCEEDED"}
        if self.status not in expects:
            return f"status {self.status}: {self.details}"
        if self.status == "OK" and self.answers < self.script.min_answers:
            return f"{self.answers} answers instead of {self.script.min_answers}"
        return ""


async def play(channel: grpc.aio.Channel, script: Script) -> CallOutcome:
    """Do what the script says; never raises for what the server does."""
    call = channel.stream_stream(script.method)(timeout=script.deadline_s)
    outcome = CallOutcome(script, NO_ANSWER, call=call)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _play(call, script, outcome)
            if outcome.status != LEFT:
                await finish(outcome)
    except TimeoutError:
        outcome.status = NO_ANSWER
        call.cancel()
    return outcome


async def finish(outcome: CallOutcome) -> None:
    """Wait for the call's status and note it."""
    code, details = await outcome.call.code(), await outcome.call.details() or ""
    raced = code is grpc.StatusCode.INTERNAL and details == rpc.WRITE_FAILED
    outcome.status, outcome.details = (WRITE_RACE if raced else code.name), details


async def _play(call: Any, script: Script, outcome: CallOutcome) -> None:
    try:
        for step in script.steps:
            if call.done():
                return
            match step.do:
                case Do.SEND:
                    outcome.sent += 1
                    await call.write(step.data)
                case Do.READ:
                    if await call.read() is grpc.aio.EOF:
                        return
                    outcome.answers += 1
                case Do.PAUSE:
                    await asyncio.sleep(0.005)
                case Do.CANCEL:
                    call.cancel()
                    return
                case Do.LEAVE:
                    outcome.status = LEFT
                    return
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            outcome.answers += 1
    except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        return
    except asyncio.CancelledError:
        # The call was cancelled, by its deadline for example; or this task was.
        if not call.done() or (task := asyncio.current_task()) is None or task.cancelling():
            raise
