"""Runs the choices of a request, several at a time, and merges their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    GenerationRequest,
    Started,
)

AT_ONCE = 8
"""Choices of one request that run at a time, so that a long list does not fill the queue."""

Run = Callable[[GenerationRequest], AsyncGenerator[Event, None]]


@dataclass
class Gathered:
    """The events of one choice so far."""

    started: Started | None = None
    chunks: list[Chunk] = field(default_factory=list)
    completion: Completion | None = None

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Chunk():
                self.chunks.append(event)
            case Completion():
                self.completion = event

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


async def run_choices(
    run: Run, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all requests with their indices, as they occur.

    Whoever reads slowly slows down the generations. The first error ends all and is raised.
    """
    if len(requests) == 1:  # in this task, without queue
        async with aclosing(run(requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[tuple[int, Event] | BaseException] = asyncio.Queue(1)
    gate = asyncio.Semaphore(AT_ONCE)

    async def work(index: int, request: GenerationRequest) -> None:
        try:
            async with gate, aclosing(run(request)) as events:
                async for event in events:
                    await merged.put((index, event))
        except Exception as error:
            await merged.put(error)

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
