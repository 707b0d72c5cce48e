"""Runs the choices of a request, several at a time, and merges their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from flyspec.errors import ResourceExhaustedError
from flyspec.values.generation import Completion, Event
from flyspec.values.requests import GenerationRequest

AT_ONCE = 8
"""Choices of one request that run at a time, so that others get a turn."""
LONGEST_REST_S = 1.0
"""Wait before a refused choice is tried again, if no other choice ends before."""

Run = Callable[[GenerationRequest, bool], AsyncGenerator[Event, None]]
"""Runs a request; the flag says whether it counts as a request of the client: the first does."""


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
    gate, ended, running, any_ended = asyncio.Semaphore(AT_ONCE), asyncio.Condition(), 0, False

    async def work(index: int, request: GenerationRequest) -> None:
        nonlocal any_ended
        try:
            async with gate:
                while not await tried(index, request):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LONGEST_REST_S), ended:
                            await ended.wait()
            any_ended = True
            async with ended:
                ended.notify()
        except Exception as error:
            await merged.put(error)

    async def tried(index: int, request: GenerationRequest) -> bool:
        """Run a choice; return False if it was refused and is worth another try.

        It is if another choice runs, or has been completed: the request was admitted.
        """
        nonlocal running
        begun, running = False, running + 1
        try:
            async with aclosing(run(request, index == 0)) as events:
                async for event in events:
                    begun = True
                    await merged.put((index, event))
        except ResourceExhaustedError:
            if begun or not (running > 1 or any_ended):
                raise
            return False
        finally:
            running -= 1
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
