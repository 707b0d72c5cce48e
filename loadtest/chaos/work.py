"""The requests sent while services are disturbed, and the comparison with fault-free ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flyspec.client import AsyncClient, Chat, GenerateOptions, Generation, Prompt
from flyspec.client.recordings import recordable
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import word_problems

EXACT = Rule("exact")
LOSSY = (Rule("fly"), Rule("fly"), Rule("fly", fly_window_size=2), Rule("fly-paper"),
         Rule("margin", margin_threshold=1.0, fly_window_size=4))  # fmt: skip
"""`fly` in the main; `margin` because its windows reach across rounds, and so across faults."""
CODE = (
    'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
)
KS = (0, 4, 15)
SAMPLINGS = (SamplingParams(), SamplingParams(), SamplingParams(0.8), SamplingParams(1.0, 0.9))
LENGTHS = (16, 32, 64, 128)
REFERENCE_CONCURRENCY = 16
TIMEOUT_S, HANG_S = 120.0, 10.0
"""Deadline of a request; one that is there so long after its deadline hangs."""


@dataclass(slots=True)
class Request:
    """A request of the run and its outcome; `expected` is that of plain decoding without faults."""

    number: int
    prompt: Prompt
    options: GenerateOptions
    expected: Generation | None = None
    generation: Generation | None = None
    error: str = ""

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
    def problem(self) -> str:
        """The fault of its outcome, or nothing. Lossy texts are judged again later."""
        got, expected = self.generation, self.expected
        if got is None:
            return self.error
        if len(got.token_ids) != got.completion.completion_tokens:
            return f"{len(got.token_ids)} tokens, but the completion says otherwise"
        if self.lossy or expected is None:
            return ""
        found, right = ((g.token_ids, g.text, g.completion.finish_reason) for g in (got, expected))
        return "" if found == right else f"it differs from the fault-free one: {found}, not {right}"

    async def send(self, client: AsyncClient) -> None:
        """Make the request and keep its outcome."""
        try:
            # The client's own deadline is what must end it; this one finds out if it does not.
            async with asyncio.timeout((self.options.timeout_s or TIMEOUT_S) + HANG_S):
                self.generation = await client.complete(self.prompt, self.options)
        except TimeoutError:
            self.error = f"it hangs {HANG_S:g} s after its deadline"
        except FlyspecError as error:
            self.error = f"{type(error).__name__}: {error}"


def varied_prompt(rng: random.Random, asked: Sequence[str]) -> Prompt:
    """Draw one of these questions, code to continue, or a long chat."""
    kind = rng.random()
    if kind < 0.55:
        return Chat.of_user(rng.choice(asked))
    if kind < 0.85:
        return rng.choice(CODE) * rng.choice((1, 1, 3)) + f"    # {rng.random()}\n"
    return Chat.of_user(" ".join(rng.choices(asked, k=8)))


async def fault_free(client: AsyncClient, seed: int, number: int) -> list[Request]:
    """Generate texts by plain decoding, for prompts of every kind, short and long."""
    rng = random.Random(f"{seed} jobs")
    questions = [p.text for p in word_problems(max(8, number), f"chaos {seed}")]
    gate = asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def one(request: Request) -> Request:
        async with gate:
            request.expected = await client.complete(request.prompt, request.options)
        return request

    return await asyncio.gather(*(
        one(Request(0, varied_prompt(rng, questions), GenerateOptions(
            sampling=rng.choice(SAMPLINGS), seed=rng.randrange(1 << 30), rule=EXACT,
            max_tokens=rng.choice(LENGTHS), ignore_eos=rng.random() < 0.4,
            num_speculative_tokens=0, timeout_s=TIMEOUT_S,
        )))
        for _ in range(number)
    ))  # fmt: skip


class Work:
    """Streams that send one request after the other; `requests` are all those begun."""

    def __init__(
        self, client: AsyncClient, texts: Sequence[Request], drafters: Sequence[str], lossy: float
    ) -> None:
        self._client, self._texts, self._drafters, self._lossy = client, texts, drafters, lossy
        self.over = False
        self.requests: list[Request] = []

    async def stream(self, rng: random.Random) -> None:
        """Send requests until `over` is set; the last one is completed."""
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
            self.requests.append(Request(number, text.prompt, options, text.expected))
            await self.requests[-1].send(self._client)
