"""The requests sent while services are disturbed, and their expected results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise

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
from flyspec.client.recordings import recordable
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import word_problems
from loadtest.prompts import varied_prompt

EXACT = Rule("exact")
LOSSY = (Rule("fly"), Rule("fly"), Rule("fly", fly_window_size=2), Rule("fly-paper"),
         Rule("margin", margin_threshold=1.0, fly_window_size=4))  # fmt: skip
"""`fly` in the main; `margin` because its windows reach across rounds, and so across faults."""
KS = (0, 4, 15)
SAMPLINGS = (SamplingParams(), SamplingParams(), SamplingParams(0.8), SamplingParams(1.0, 0.9))
LENGTHS = (16, 32, 64, 128)
REFERENCE_CONCURRENCY = 16
TIMEOUT_S, HANG_S = 120.0, 10.0
"""Deadline of a request; one that is there so long after its deadline hangs."""


@dataclass(slots=True)
class Request:
    """A request of the run, its outcome, when tokens came and how many.

    `expected` is the output of plain decoding without faults.
    """

    number: int
    prompt: Prompt
    options: GenerateOptions
    begun_s: float = 0.0
    ended_s: float = 0.0
    expected: Generation | None = None
    generation: Generation | None = None
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def lossy(self) -> bool:
        """True if its text may differ from plain decoding."""
        return self.options.rule != EXACT

    def __str__(self) -> str:
        o = self.options
        drafter = o.drafter or "the default drafter"
        rule = o.rule.name if o.rule else "the default rule"
        return f"request {self.number} ({rule}, K {o.num_speculative_tokens}, {drafter})"

    @property
    def silence_s(self) -> float:
        """The longest time without tokens."""
        times = [self.begun_s, *(at for at, _ in self.arrivals), self.ended_s]
        return max(b - a for a, b in pairwise(times))

    @property
    def problem(self) -> str:
        """The fault of its outcome, or nothing. Lossy texts are judged again later."""
        got, expected = self.generation, self.expected
        if got is None:
            tokens = sum(number for _, number in self.arrivals)
            return f"{self.error} ({tokens} tokens came, longest silence {self.silence_s:.1f} s)"
        number, count = len(got.token_ids), got.completion.completion_tokens
        if number != count:
            return f"{number} tokens came, the completion says {count}"
        if self.lossy or expected is None:
            return ""
        for name, one, other in (
            ("tokens", got.token_ids, expected.token_ids),
            ("text", got.text, expected.text),
            ("end", got.completion.finish_reason, expected.completion.finish_reason),
        ):
            if one != other:
                return f"the {name} differs from the fault-free one: {one} instead of {other}"
        return ""

    async def send(self, client: AsyncClient, now: Callable[[], float]) -> None:
        """Make the request and record its outcome."""
        self.begun_s = now()
        try:
            # The client's own deadline is what must end it; this one finds out if it does not.
            async with asyncio.timeout((self.options.timeout_s or TIMEOUT_S) + HANG_S):
                await self._consume(client, now)
        except TimeoutError:
            self.error = f"it hangs: still there after {now() - self.begun_s:.0f} s"
        except FlyspecError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended_s = now()

    async def _consume(self, client: AsyncClient, now: Callable[[], float]) -> None:
        started: Started | None = None
        transcript, rounds = Transcript(), list[RoundRecord]()
        events = client.generate(self.prompt, self.options)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Chunk():
                        transcript.add(event)
                        self.arrivals.append((now(), len(event.token_ids)))
                    case RoundRecord():
                        rounds.append(event)
                    case Completion() if started is not None:
                        self.generation = Generation(started, transcript.chunks, event, rounds)
                        return
        raise FlyspecError("the stream ended without a completion")


async def fault_free(client: AsyncClient, seed: int, number: int) -> list[Request]:
    """Generate texts by plain decoding, for prompts of every kind, short and long."""
    rng = random.Random(f"{seed} jobs")
    questions = [p.text for p in word_problems(max(8, number), f"chaos {seed}")]
    gate = asyncio.Semaphore(REFERENCE_CONCURRENCY)
    found = []
    for _ in range(number):
        options = GenerateOptions(
            sampling=rng.choice(SAMPLINGS), seed=rng.randrange(1 << 30), rule=EXACT,
            max_tokens=rng.choice(LENGTHS), ignore_eos=rng.random() < 0.4,
            num_speculative_tokens=0, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        found.append(Request(0, varied_prompt(rng, questions), options))

    async def one(request: Request) -> None:
        async with gate:
            request.expected = await client.complete(request.prompt, request.options)

    await asyncio.gather(*map(one, found))
    return found


class Work:
    """Streams that send one request after the other; `requests` are all those begun."""

    def __init__(
        self, client: AsyncClient, texts: Sequence[Request], drafters: Sequence[str], lossy: float
    ) -> None:
        self._client, self._texts, self._drafters, self._lossy = client, texts, drafters, lossy
        self.over = False
        self.requests: list[Request] = []

    async def run(self, streams: int, seed: int, now: Callable[[], float]) -> None:
        """Run streams until `over` is set; requests still running then are completed."""
        async with asyncio.TaskGroup() as tasks:
            for stream in range(streams):
                tasks.create_task(self._stream(random.Random(f"{seed} stream {stream}"), now))

    async def _stream(self, rng: random.Random, now: Callable[[], float]) -> None:
        while not self.over:
            text, lossy = rng.choice(self._texts), rng.random() < self._lossy
            options = replace(
                text.options,
                rule=rng.choice(LOSSY) if lossy else EXACT,
                num_speculative_tokens=rng.choice(KS),
                drafter=rng.choice(self._drafters),
            )
            options = recordable(options) if lossy else options
            number = len(self.requests) + 1
            request = Request(number, text.prompt, options, expected=text.expected)
            self.requests.append(request)
            await request.send(self._client, now)
