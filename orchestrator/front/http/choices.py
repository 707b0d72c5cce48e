"""Runs the choices of a request, several at a time, and merges their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress

from flyspec.errors import ResourceExhaustedError
from flyspec.values.generation import Completion, Event
from flyspec.values.requests import GenerationRequest

AT_ONCE = 8
"""Choices of one request that run at a time, so that others get a turn."""
LONGEST_REST_S = 1.0
"""Wait before a refused choice is tried again, if no other choice ends before."""

Run = Callable[[GenerationRequest, bool], AsyncGenerator[Event, None]]
"""Runs a request; the flag says whether it counts as a request of the client: the first does."""


class _Room:
    """Count of a request's running choices, and the time at which the next may try."""

    def __init__(self) -> None:
        self._running, self._any_ended = 0, False
        self._ended = asyncio.Condition()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a choice as running."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def is_shared(self) -> bool:
        """True if another choice runs, or has been completed: the request was admitted."""
        return self._running > 1 or self._any_ended

    async def end(self) -> None:
        """Record that a choice is complete, and let the next one try."""
        self._any_ended = True
        async with self._ended:
            self._ended.notify()

    async def wait(self) -> None:
        """Wait until a choice is complete, or a while: others may have made room."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_REST_S), self._ended:
                await self._ended.wait()


async def run_choices(
    run: Run, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all requests with their indices, as they occur.

    Whoever reads slowly slows down the generations. A choice that is refused for lack of room waits
    for the others; any other error, and a refusal of all of them, ends all and is raised.
    """
    if len(requests) == 1:  # in this task, without queue
        async with aclosing(run(requests[0], True)) as events:
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[tuple[int, Event] | BaseException] = asyncio.Queue(1)
    gate, room = asyncio.Semaphore(AT_ONCE), _Room()

    async def work(index: int, request: GenerationRequest) -> None:
        try:
            async with gate:
                while not await tried(index, request):
                    await room.wait()
            await room.end()
        except Exception as error:
            await merged.put(error)

    async def tried(index: int, request: GenerationRequest) -> bool:
        """Run a choice; return False if it was refused and is worth another try."""
        begun = False
        with room.taken():
            try:
                async with aclosing(run(request, index == 0)) as events:
                    async for event in events:
                        begun = True
                        await merged.put((index, event))
            except ResourceExhaustedError:
                if begun or not room.is_shared:
                    raise
                return False
        return True

    tasks = [asyncio.create_task(work(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            item = await merged.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            left -= isinstance(item[1], Completion)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
