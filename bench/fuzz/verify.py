"""Scripts for the verify service: sessions that are right but for one thing, and worse."""

from __future__ import annotations

from functools import partial
from random import Random

from bench.fuzz.facts import (
    CANCEL,
    LEAVE,
    PAUSE,
    Facts,
    one_of,
    send,
    spoil_one,
    unary_junk,
)
from bench.fuzz.script import BLAMELESS, FINE, Script
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.verify_mistakes import BAD_OPENS, BAD_ROUNDS
from bench.fuzz.verify_session import GoodVerifySession
from flyspec.v1 import verify_pb2

METHOD = "/flyspec.v1.VerifyService/Verify"
UNARY = [
    (
        "/flyspec.v1.VerifyService/Describe",
        verify_pb2.VerifyServiceDescribeRequest,
        lambda _: verify_pb2.VerifyServiceDescribeRequest(),
    ),
    (
        "/flyspec.v1.VerifyService/GetTokenizer",
        verify_pb2.GetTokenizerRequest,
        lambda _: verify_pb2.GetTokenizerRequest(),
    ),
    *SYSTEM_METHODS,
]


class VerifySource:
    """Sessions of `Verify`, the other methods, and what every server has."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def script(self, rng: Random) -> Script:
        """A call: mostly a session with something wrong in it."""
        return one_of(
            rng,
            (
                (20, self._good),
                (40, self._one_bad),
                (25, self._spoiled),
                (5, self._out_of_order),
                (1, self._edge),
                (4, self._abandoned),
                (6, partial(unary_junk, methods=UNARY)),
            ),
        )

    def _good(self, rng: Random) -> Script:
        session = GoodVerifySession(self._facts, rng)
        steps = session.steps(rng.randint(0, 6), paced=rng.random() < 0.8)
        return Script(METHOD, tuple(steps), "a good session", FINE, session.due)

    def _one_bad(self, rng: Random) -> Script:
        """Good messages, then one that must be refused, then more."""
        session = GoodVerifySession(self._facts, rng)
        bad_open = rng.random() < 0.3
        before = [] if bad_open else session.steps(rng.randint(0, 3), paced=rng.random() < 0.7)
        make = rng.choice(BAD_OPENS if bad_open else BAD_ROUNDS)
        made = make(session, rng)
        messages, expects = made[:-1], made[-1]
        steps = [*before, *(send(m) for m in messages)]
        if rng.random() < 0.5:
            steps += [PAUSE, send(session.round()[-1], "after it")]
        kind = make.__doc__ or make.__name__
        return Script(METHOD, tuple(steps), kind.rstrip("."), expects)

    def _spoiled(self, rng: Random) -> Script:
        session = GoodVerifySession(self._facts, rng)
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        for _ in range(rng.choice((1, 1, 2))):
            steps = spoil_one(steps, _read, rng)
        return Script(METHOD, tuple(steps), "a message spoiled")

    def _out_of_order(self, rng: Random) -> Script:
        session = GoodVerifySession(self._facts, rng)
        steps = session.steps(rng.randint(2, 5), paced=False)
        rng.shuffle(steps)
        return Script(METHOD, tuple(steps), "messages shuffled")

    def _edge(self, rng: Random) -> Script:
        """A sequence that ends just before its context, or grows beyond it."""
        session = GoodVerifySession(self._facts, rng)
        length = self._facts.context_length - rng.randrange(14)
        session.known = [rng.choice(session.text) for _ in range(length)]
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        return Script(METHOD, tuple(steps), "at the end of the context", BLAMELESS)

    def _abandoned(self, rng: Random) -> Script:
        session = GoodVerifySession(self._facts, rng)
        steps = session.steps(rng.randint(0, 3), paced=rng.random() < 0.5)
        steps = steps[: rng.randint(0, len(steps))]
        how = rng.random()
        if how < 0.6:
            return Script(METHOD, (*steps, CANCEL), "cancelled")
        if how < 0.8:
            return Script(METHOD, (*steps, LEAVE), "left open")
        deadline = rng.choice((0.001, 0.01, 0.05))
        return Script(METHOD, tuple(steps), "its deadline passes", BLAMELESS, 0, deadline)


def _read(data: bytes) -> verify_pb2.VerifyRequest:
    try:
        return verify_pb2.VerifyRequest.FromString(data)
    except Exception:
        return verify_pb2.VerifyRequest()
