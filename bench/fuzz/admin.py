"""Scripts for the orchestrator's `AdminService`."""

from __future__ import annotations

import math
from functools import partial
from random import Random

from google.protobuf.message import Message

from bench.fuzz.facts import CANCEL, Facts, one_of, readable, send, unary_junk
from bench.fuzz.script import BLAMELESS, INVALID, NOT_FOUND, Action, Do, Script
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.values import junk, mangle, mutate
from flyspec.v1 import admin_pb2

SERVICE = "/flyspec.v1.AdminService/"
PATIENCE_S = 3.0
ANSWERS = BLAMELESS | {"UNAVAILABLE"}
"""A drafter that does not answer is UNAVAILABLE to an operator, and that is right."""
NAMES = ("fuzz-0", "fuzz-1", "fuzz-2")
BAD_NAMES = ("", "a b", "\0", "ä", "n" * 65, "n" * 100_000, "../x")
BAD_ADDRESSES = (
    "", "nowhere", ":", "127.0.0.1:0", "127.0.0.1:99999", "[::1", "unix:///etc/passwd",
    "ftp://x:1", "127.0.0.1:1", "a" * 70_000, "\0:1", "dns:///", "xds:///x", "-1:-1",
)  # fmt: skip


class AdminSource:
    """An operator's calls, most of them wrong. `address` is that of a real draft service."""

    def __init__(self, facts: Facts, address: str) -> None:
        self._facts, self._address = facts, address

    def script(self, rng: Random) -> Script:
        """A call."""
        return one_of(
            rng,
            (
                (30, self._right),
                (30, self._wrong),
                (20, self._spoiled),
                (15, self._bytes),
                (5, partial(unary_junk, methods=SYSTEM_METHODS)),
            ),
        )

    def _call(self, message: Message, kind: str, expects: frozenset[str] = ANSWERS) -> Script:
        method = SERVICE + type(message).__name__.removesuffix("Request")
        return Script(method, (send(message),), kind, expects, 0, PATIENCE_S)

    def _right(self, rng: Random) -> Script:
        """A call that may be granted; the state that it meets is whatever others left."""
        return self._call(self._message(rng), "a right call")

    def _message(self, rng: Random) -> Message:
        name = rng.choice((*NAMES, *self._facts.drafters))
        match rng.randrange(16):
            case 0 | 1 | 2:
                return admin_pb2.GetStatusRequest()
            case 3 | 4 | 5 | 6:
                return admin_pb2.ListDraftersRequest()
            case 7 | 8:
                kind = rng.choice(("", "model", "prompt_lookup", "multi_level"))
                return admin_pb2.RegisterDrafterRequest(
                    name=rng.choice(NAMES), address=self._address, kind=kind
                )
            case 9 | 10 | 11:
                message = admin_pb2.ActivateDrafterRequest(name=name)
                if rng.random() < 0.7:
                    message.share = rng.choice((0.0, 0.2, 0.999, 1.0, 5e-324))
                return message
            case 12:
                return admin_pb2.DrainDrafterRequest(name=name, wait_ms=rng.choice((0, 1, 200)))
            case 13 | 14:
                return admin_pb2.RemoveDrafterRequest(name=name, force=rng.random() < 0.5)
            case _:
                return admin_pb2.DrainRequest(resume=True)

    def _wrong(self, rng: Random) -> Script:
        """A call that must be refused, whatever the state."""
        match rng.randrange(5):
            case 0:
                share = rng.choice((-0.1, 1.1, math.nan, math.inf, -math.inf))
                message: Message = admin_pb2.ActivateDrafterRequest(
                    name=self._facts.drafters[0], share=share
                )
                return self._call(message, "a share out of range", INVALID | NOT_FOUND)
            case 1:
                name = rng.choice(BAD_NAMES)
                message = admin_pb2.RegisterDrafterRequest(name=name, address=self._address)
                return self._call(message, "a name that is none", INVALID)
            case 2:
                address = rng.choice(BAD_ADDRESSES)
                message = admin_pb2.RegisterDrafterRequest(name="fuzz-9", address=address)
                return self._call(message, "an address that is none", ANSWERS - {"OK"})
            case 3:
                message = admin_pb2.RegisterDrafterRequest(
                    name="fuzz-9",
                    address=self._address,
                    kind=rng.choice(("magic", "\0", "M" * 999)),
                )
                expects = INVALID | {"NOT_FOUND", "FAILED_PRECONDITION"}
                return self._call(message, "a kind that is none", expects)
            case _:
                cls = rng.choice(
                    (
                        admin_pb2.ActivateDrafterRequest,
                        admin_pb2.DrainDrafterRequest,
                        admin_pb2.RemoveDrafterRequest,
                    )
                )
                message = cls(name=rng.choice(("nobody", *BAD_NAMES)))
                return self._call(message, "a drafter that is none", INVALID | NOT_FOUND)

    def _spoiled(self, rng: Random) -> Script:
        message = self._message(rng)
        if not isinstance(message, admin_pb2.DrainRequest) and message.DESCRIPTOR.fields:
            mutate(message, rng)
        return self._call(message, "a field changed")

    def _bytes(self, rng: Random) -> Script:
        message = self._message(rng)
        good = message.SerializeToString()
        script = self._call(message, "bytes spoiled")
        data = mangle(good, rng) if rng.random() < 0.6 else junk(rng)
        if isinstance(message, admin_pb2.DrainRequest) and "OK" in readable(type(message), data):
            data = good  # to drain the server would be right, and end the run
        steps = (Action(Do.SEND, data, "bytes"),) * rng.choice((1, 1, 1, 2))
        if rng.random() < 0.1:
            steps = (*steps, CANCEL)
        return Script(script.method, steps, script.kind, ANSWERS, 0, PATIENCE_S)
