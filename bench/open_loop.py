"""Requests that come when they come: Poisson arrivals, whatever became of those before.

One process and one event loop; how late requests leave, and how busy this process is, is measured
with them, so that a generator that is itself the bottleneck shows.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from flyspec.client import Chunk, Client, Completion, GenerateOptions, Prompt, Started
from flyspec.errors import FlyspecError, ResourceExhaustedError
from loadtest.arrivals import poisson

Outcome = Literal["complete", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Result:
    """One request. Times in seconds: `planned` and `sent` since the run began.

    `retry_after_s` is None where a refusal did not say it. `started_s` and `first_token_s` are
    since it was sent, None if it did not come so far.
    """

    planned: float
    sent: float
    seconds: float
    outcome: Outcome
    tokens: int = 0
    retry_after_s: float | None = None
    error: str = ""
    started_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a load. `busy` is the share of one core that this process took."""

    seconds: float
    results: Sequence[Result]
    busy: float

    def latencies(self) -> list[float]:
        """Of the requests that were completed, seconds, from when they were due; sorted."""
        return sorted(
            r.seconds + r.sent - r.planned for r in self.results if r.outcome == "complete"
        )

    def count(self, outcome: Outcome) -> int:
        """Requests with that outcome."""
        return sum(r.outcome == outcome for r in self.results)


class Load:
    """Sends requests: `prompts` in turn, of half to one and a half times `options.max_tokens`.

    Several `clients` take turns.
    """

    def __init__(
        self,
        clients: Client | Sequence[Client],
        prompts: Sequence[Prompt],
        options: GenerateOptions,
        seed: int = 0,
    ) -> None:
        self._clients = [clients] if isinstance(clients, Client) else clients
        self._prompts, self._options = prompts, options
        self._rng = random.Random(seed)
        self._sent = 0

    async def one(self, begin: float, planned: float) -> Result:
        """A request, sent now; it was due `planned` seconds after `begin`."""
        prompt = self._prompts[self._sent % len(self._prompts)]
        client = self._clients[self._sent % len(self._clients)]
        self._sent += 1
        mean = self._options.max_tokens or 1
        longest = self._rng.randint(max(1, mean // 2), max(1, 3 * mean // 2))
        options = replace(self._options, max_tokens=longest)
        sent, tokens = time.perf_counter(), 0
        outcome: Outcome = "failed"
        started = first_token = None
        retry_after, message = None, "the stream ended without a completion"
        try:
            generation = client.generate(prompt, options)
            async with aclosing(generation) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Started):
                        started = time.perf_counter() - sent
                    elif isinstance(event, Chunk) and first_token is None:
                        first_token = time.perf_counter() - sent
                    elif isinstance(event, Completion):
                        outcome, message = "complete", ""
                        tokens = event.completion_tokens
        except ResourceExhaustedError as error:
            outcome, retry_after, message = "refused", error.retry_after_s, str(error)
        except FlyspecError as error:
            message = f"{error.status}: {error}"
        seconds = time.perf_counter() - sent
        return Result(
            planned, sent - begin, seconds, outcome, tokens, retry_after, message,
            started, first_token,
        )  # fmt: skip

    async def closed(self, workers: int, seconds: float) -> Run:
        """So many clients, each with one request after the other, for so long."""
        begin, used = time.perf_counter(), time.process_time()
        results: list[Result] = []

        async def work() -> None:
            while (now := time.perf_counter() - begin) < seconds:
                results.append(await self.one(begin, now))

        await asyncio.gather(*(work() for _ in range(workers)))
        return _run(begin, used, results)

    async def open(
        self, rate: float, seconds: float, on_end: Callable[[], None] = lambda: None
    ) -> Run:
        """`rate` requests a second on average for so long; then waits for the last to end.

        `on_end` is called when the last is sent.
        """
        begin, used = time.perf_counter(), time.process_time()
        tasks: list[asyncio.Task[Result]] = []
        for planned in poisson(rate, seconds, self._rng):
            wait = begin + planned - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self.one(begin, planned)))
            if wait <= 0:  # behind: let those that are under way have their turn
                await asyncio.sleep(0)
        on_end()
        busy = (time.process_time() - used) / (time.perf_counter() - begin)
        results = await asyncio.gather(*tasks)
        return Run(seconds, results, busy)


def _run(begin: float, used: float, results: Sequence[Result]) -> Run:
    seconds = time.perf_counter() - begin
    return Run(seconds, results, (time.process_time() - used) / seconds)
