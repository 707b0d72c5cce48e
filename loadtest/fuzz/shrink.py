"""The smallest script that still shows a finding."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from loadtest.fuzz.calls import BLAMELESS, Script, Step
from loadtest.fuzz.encoded import readable
from loadtest.fuzz.mutate import is_map, places


async def shrunk(
    script: Script, shows: Callable[[Script], Awaitable[bool]], seconds: float
) -> Script | None:
    """A part of the script that `shows` is true of; None if not even all of it does, alone."""
    if not await shows(script):
        return None
    deadline, parts = time.monotonic() + seconds, _parts(script)
    while (part := next(parts, None)) and time.monotonic() < deadline:
        if await shows(part):
            script, parts = part, _parts(part)
    return script


def _parts(script: Script) -> Iterator[Script]:
    """The script without some of its steps, or with less in one of its messages."""
    steps, size = script.steps, len(script.steps) // 2
    while size:
        for at in range(0, len(steps), size):
            yield _only(script, (*steps[:at], *steps[at + size :]))
        size //= 2
    for at, step in enumerate(steps):
        for less in _less(script, step) if isinstance(step, bytes) else ():
            yield _only(script, (*steps[:at], less, *steps[at + 1 :]))


def _only(script: Script, steps: tuple[Step, ...]) -> Script:
    # Of a part it is not known whether it is right, and how many answers are due.
    return replace(script, steps=steps, allowed=script.allowed | BLAMELESS, min_answers=0)


def _less(script: Script, data: bytes) -> Iterator[bytes]:
    """A message without one of its fields, or with half of a list; bytes that are none, halved."""
    if (whole := readable(script.method.request, data)) is None:
        half = len(data) // 2
        yield from (data[:half], data[half:]) if half else ()
        return
    for index, (owner, field) in enumerate(places(whole)):
        listed = field.is_repeated and not is_map(field)
        half = len(getattr(owner, field.name)) // 2 if listed else 0
        for cut in (None, slice(half), slice(half, None)) if half else (None,):
            message = script.method.request.FromString(data)
            part, _ = list(places(message))[index]
            if cut is None:
                part.ClearField(field.name)
            else:
                del getattr(part, field.name)[cut]
            if len(less := message.SerializeToString()) < len(data):
                yield less
