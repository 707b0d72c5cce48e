"""The requests sent while services are disturbed, and their expected results."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Annotated

from flyspec.client import (
    AsyncClient,
    Chunk,
    Completion,
    GenerateOptions,
    Generation,
    Prompt,
    RoundRecord,
    Started,
    Transcript,
)
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.prompts import word_problems
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.chaos.fleet import FleetOptions
from loadtest.prompts import varied_prompt

EXACT = Rule("exact")
LOSSY = (Rule("fly"), Rule("fly"), Rule("fly", fly_window_size=2), Rule("fly-paper"),
         Rule("margin", margin_threshold=1.0, fly_window_size=4))  # fmt: skip
"""`fly` in the main; `margin` because its windows reach across rounds, and so across faults."""
KS = (0, 4, 15)
SAMPLINGS = (SamplingParams(), SamplingParams(), SamplingParams(0.8), SamplingParams(1.0, 0.9))
LENGTHS = (16, 32, 64, 128)
REFERENCE_CONCURRENCY = 16
HANG_S = 10.0
"""A request that is there so long after its deadline hangs."""


# fmt: off
@dataclass(frozen=True)
class ChaosOptions:
    """A run. `once`: each fault once instead; without `ill`, only faults from outside."""

    seconds: Annotated[float, Flag("Seconds of faults.", min=0)] = 300.0
    streams: Annotated[int, Flag("Concurrent requests.", min=1)] = 32
    texts: Annotated[int, Flag("Number of different texts.", min=1)] = 96
    lossy_share: Annotated[float, Flag("Share of requests with lossy rules.", min=0)] = 0.3
    timeout_s: Annotated[float, Flag(
        "Time limit per request in seconds.", name="--timeout", min=0,
    )] = 120.0
    seed: Annotated[int | None, Flag("Random seed (default: chosen and reported).")] = None
    once: Annotated[bool, Flag("Inject each fault once, whatever --seconds says.")] = False
    ill: bool = True
    fleet: FleetOptions = field(default_factory=FleetOptions)
    # fmt: on


@dataclass(slots=True)
class TextJob:
    """A text to request; `options` lack rule, K and drafter, which do not change it.

    `expected` is its output without faults.
    """

    prompt: Prompt
    options: GenerateOptions
    expected: Generation | None = None


def texts(seed: int, number: int) -> list[TextJob]:
    """Return prompts of every kind, short and long, greedy and sampled."""
    rng = random.Random(f"{seed} jobs")
    asked = [p.text for p in word_problems(max(8, number), f"chaos {seed}")]
    found = []
    for _ in range(number):
        options = GenerateOptions(
            sampling=rng.choice(SAMPLINGS),
            seed=rng.randrange(1 << 30),
            max_tokens=rng.choice(LENGTHS),
            ignore_eos=rng.random() < 0.4,
        )
        found.append(TextJob(varied_prompt(rng, asked), options))
    return found


async def fill_in(client: AsyncClient, wanted: Sequence[TextJob]) -> None:
    """Generate the expected texts by plain decoding, before any fault."""
    gate = asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def one(job: TextJob) -> None:
        options = replace(job.options, rule=EXACT, num_speculative_tokens=0, timeout_s=120.0)
        async with gate:
            job.expected = await client.complete(job.prompt, options)

    async with asyncio.TaskGroup() as tasks:
        for job in wanted:
            tasks.create_task(one(job))


@dataclass(slots=True)
class Request:
    """A request of the run: what it asked for, when, and its outcome."""

    number: int
    job: TextJob
    options: GenerateOptions
    begun_s: float
    ended_s: float = 0.0
    generation: Generation | None = None
    error: str = ""
    hung: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""

    @property
    def lossy(self) -> bool:
        """Whether its text may differ from plain decoding."""
        return self.options.rule != EXACT

    def __str__(self) -> str:
        o = self.options
        assert o.rule is not None
        drafter = o.drafter or "the default drafter"
        return f"request {self.number} ({o.rule.name}, K {o.num_speculative_tokens}, {drafter})"

    @property
    def problem(self) -> str:
        """Return what is wrong with its outcome, or nothing. Lossy texts are judged again later."""
        if self.hung:
            lasted_s = self.ended_s - self.begun_s
            return f"it hangs: still there after {lasted_s:.0f} s ({self._arrived()})"
        if self.error:
            return f"{self.error} ({self._arrived()})"
        got, expected = self.generation, self.job.expected
        assert got is not None
        if got.completion.completion_tokens != len(got.token_ids):
            return (
                f"{len(got.token_ids)} tokens came, the completion says "
                f"{got.completion.completion_tokens}"
            )
        if self.lossy or expected is None:
            return ""
        if got.token_ids != expected.token_ids:
            pairs = zip(got.token_ids, expected.token_ids, strict=False)
            at = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            return (
                f"token {at} differs from the fault-free text: "
                f"{got.token_ids[at : at + 4]} instead of {expected.token_ids[at : at + 4]} "
                f"({len(got.token_ids)} tokens instead of {len(expected.token_ids)})"
            )
        if got.text != expected.text:
            return "the text differs from the fault-free one though its tokens are equal"
        if got.completion.finish_reason is not expected.completion.finish_reason:
            return f"finish reason {got.completion.finish_reason.name}"
        return ""

    def _arrived(self) -> str:
        """Describe the tokens that arrived, and the longest silence."""
        if not self.arrivals:
            return "nothing came"
        times = [self.begun_s, *(at for at, _ in self.arrivals), self.ended_s]
        return (
            f"{sum(n for _, n in self.arrivals)} of up to {self.options.max_tokens} tokens came, "
            f"the last at {self.arrivals[-1][0]:.1f} s; longest silence "
            f"{max(b - a for a, b in pairwise(times)):.1f} s"
        )


class Work:
    """Streams that send one request after the other; `requests` are all those begun."""

    def __init__(
        self,
        client: AsyncClient,
        options: ChaosOptions,
        seed: int,
        wanted: Sequence[TextJob],
        drafters: Sequence[str],
        now: Callable[[], float],
    ) -> None:
        self._client, self._options, self._seed = client, options, seed
        self._jobs, self._drafters, self._now = wanted, drafters, now
        self._over = False
        self.requests: list[Request] = []

    def finish(self) -> None:
        self._over = True

    async def run(self) -> None:
        """Run all streams until `finish`; requests still running then are completed."""
        async with asyncio.TaskGroup() as tasks:
            for stream in range(self._options.streams):
                tasks.create_task(self._stream(random.Random(f"{self._seed} stream {stream}")))

    async def _stream(self, rng: random.Random) -> None:
        for job, options in self._requests(rng):
            if self._over:
                return
            request = Request(len(self.requests) + 1, job, options, self._now())
            self.requests.append(request)
            await ask(self._client, request, self._now, self._options.timeout_s)

    def _requests(self, rng: random.Random) -> Iterator[tuple[TextJob, GenerateOptions]]:
        while True:
            job = rng.choice(self._jobs)
            lossy = rng.random() < self._options.lossy_share
            yield (
                job,
                replace(
                    job.options,
                    rule=rng.choice(LOSSY) if lossy else EXACT,
                    num_speculative_tokens=rng.choice(KS),
                    drafter=rng.choice(self._drafters),
                    return_rounds=lossy,
                    timeout_s=self._options.timeout_s,
                ),
            )


async def ask(
    client: AsyncClient, request: Request, now: Callable[[], float], timeout_s: float
) -> None:
    """Make a request and record its outcome; `timeout_s` is its deadline."""
    try:
        # The client's own deadline is what must end it; this one finds out if it does not.
        async with asyncio.timeout(timeout_s + HANG_S):
            await _consume(client, request, now)
    except TimeoutError:
        request.hung = True
    except FlyspecError as error:
        request.error = f"{type(error).__name__}: {error}"
    request.ended_s = now()


async def _consume(client: AsyncClient, request: Request, now: Callable[[], float]) -> None:
    started: Started | None = None
    transcript = Transcript()
    rounds: list[RoundRecord] = []
    events = client.generate(request.job.prompt, request.options)
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            match event:
                case Started():
                    started = event
                case Chunk():
                    transcript.add(event)
                    request.arrivals.append((now(), len(event.token_ids)))
                case RoundRecord():
                    rounds.append(event)
                case Completion() if started is not None:
                    request.generation = Generation(started, transcript.chunks, event, rounds)
                    return
    raise FlyspecError("the stream ended without a completion")


async def drafts(client: AsyncClient, name: str, timeout_s: float = 20.0) -> bool:
    """Return whether a generation that names a drafter gets it, without any recovery."""
    options = GenerateOptions(
        max_tokens=16, ignore_eos=True, drafter=name, rule=EXACT, num_speculative_tokens=4,
        timeout_s=timeout_s,
    )  # fmt: skip
    with contextlib.suppress(FlyspecError):
        completion = (await client.complete("import os\n", options)).completion
        return [d.drafter for d in completion.drafters] in ([name], [])
    return False
