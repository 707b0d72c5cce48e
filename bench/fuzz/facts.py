"""What is known of the server before it is fuzzed, and what all sources of scripts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from google.protobuf.message import Message

from bench.fuzz.script import BLAMELESS, INVALID, Action, Do, Script
from bench.fuzz.values import junk, mangle, mutate

READ, PAUSE, CANCEL, LEAVE = Action(Do.READ), Action(Do.PAUSE), Action(Do.CANCEL), Action(Do.LEAVE)


@dataclass(frozen=True)
class Facts:
    """Sizes that messages are made to fit, or not to; `texts` are sequences that make sense."""

    vocab_size: int
    context_length: int
    max_drafts: int
    max_plain: int
    texts: tuple[tuple[int, ...], ...] = ()
    drafters: tuple[str, ...] = ()


class ScriptSource(Protocol):
    """Makes scripts for one server."""

    def script(self, rng: Random) -> Script:
        """The script that this generator leads to."""


def send(message: Message, label: str = "") -> Action:
    """A step that sends a message."""
    return Action(Do.SEND, message.SerializeToString(), label or short(message))


def short(message: Message) -> str:
    """A message in one line of bearable length."""
    text = " ".join(str(message).split()) if message.ByteSize() < 2000 else type(message).__name__
    return text if len(text) < 300 else text[:300] + " ..."


def one_of(rng: Random, makers: Sequence[tuple[float, Callable[[Random], Script]]]) -> Script:
    """A script by one of the makers, taken by their weights."""
    make = rng.choices([make for _, make in makers], [weight for weight, _ in makers])[0]
    return make(rng)


def spoil_one(steps: list[Action], cls: type[Any], rng: Random) -> list[Action]:
    """The same with one message changed: a field or two, its bytes, its place, or twice."""
    sends = [i for i, step in enumerate(steps) if step.do is Do.SEND]
    at = rng.choice(sends)
    data = steps[at].data
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            message = cls() if readable(cls, data) != BLAMELESS else cls.FromString(data)
            for _ in range(rng.choice((1, 1, 2, 4))):
                mutate(message, rng)
            changed = [send(message)]
        case 4:
            changed = [Action(Do.SEND, mangle(data, rng), "mangled")]
        case 5:
            changed = [Action(Do.SEND, junk(rng), "junk")]
        case 6:
            changed = [steps[at], Action(Do.SEND, data, "once more")]
        case _:
            other = rng.choice(sends)
            steps = list(steps)
            steps[other] = steps[at]
            changed = [steps[other]] if other == at else [send(cls())]
    return [*steps[:at], *changed, *steps[at + 1 :]]


UnaryMethod = tuple[str, Callable[[Random], Message]]
"""A method's path, and what makes a right message for it."""


def bare(method: str, cls: type[Message]) -> UnaryMethod:
    """A method that is asked with an empty message."""
    return method, lambda _: cls()


def unary_junk(rng: Random, methods: Sequence[UnaryMethod]) -> Script:
    """A call of one of the unary methods, with a message that is right, bad, missing or doubled."""
    method, make = rng.choice(methods)
    message = make(rng)
    cls, good = type(message), message.SerializeToString()
    how = rng.randrange(8)
    if how < 3 and cls.DESCRIPTOR.fields:
        mutate(message, rng)
        return Script(method, (send(message),), "unary: a field changed")
    if how < 5:
        step = spoiled(good, rng)
        return Script(method, (step,), "unary: bytes", readable(cls, step.data))
    if how == 5:
        count = rng.choice((0, 2, 5))
        return Script(method, (Action(Do.SEND, good, "unary"),) * count, "unary: none or several")
    if how == 6:
        # Reflection leaves its streams open for minutes, and holds nothing with them.
        step = CANCEL if "reflection" in method or rng.random() < 0.5 else LEAVE
        return Script(
            method, (*[Action(Do.SEND, good)] * rng.randrange(2), step), "unary: abandoned"
        )
    return Script(method, (Action(Do.SEND, good, "unary"),), "unary: as it should be")


def spoiled(data: bytes, rng: Random, mangled: float = 0.5) -> Action:
    """A step that sends bytes which are no message any more (a share `mangled`), or never were."""
    return Action(Do.SEND, mangle(data, rng) if rng.random() < mangled else junk(rng), "bytes")


def readable(cls: type[Message], data: bytes) -> frozenset[str]:
    """Which statuses the bytes may get: only one if they are no message."""
    try:
        cls.FromString(data)
    except Exception:
        return INVALID | {"UNIMPLEMENTED"}
    return BLAMELESS
