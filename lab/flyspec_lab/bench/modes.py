"""Systems under test, all timed alike: the services, transformers, other servers."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flyspec.client import AsyncClient, Chunk, Completion, GenerateOptions, Prompt
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.generation import GenerationTimings, SpeculationMetrics

_NOISE_TOKENS = 24
_NOISE = GenerateOptions(
    max_tokens=2, rule=Rule("exact"), num_speculative_tokens=1, ignore_eos=True
)


@dataclass(frozen=True)
class Sample:
    """One generation: its time, and its metrics if flyspec made it.

    `token_ids` are empty if only their number is known. `chosen` is the mode that hindsight chose.
    `first_tokens` came at once, as the first.
    """

    group: str
    prompt: int
    repeat: int
    mode: str
    seconds: float
    tokens: int
    token_ids: Sequence[int] = ()
    first_token_s: float | None = None
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    timings: GenerationTimings = field(default_factory=GenerationTimings)
    chosen: str = ""
    first_tokens: int = 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first ones."""
        rest, rest_s = self.tokens - self.first_tokens, self.seconds - (self.first_token_s or 0.0)
        return rest / rest_s if self.first_token_s and rest and rest_s > 0 else None


@dataclass(frozen=True)
class Item:
    """A prompt of a group, with the number of tokens that plain decoding makes of it.

    All modes get its tokens where they are known: other software does not know the chat template.
    """

    group: str
    index: int
    prompt: Prompt
    prompt_token_ids: Sequence[int] = ()
    plain_tokens: int = 0
    prediction: str = ""


@dataclass
class FlyspecMode:
    """The services, with fixed request options, and the item's prediction if it `predicts`."""

    name: str
    client: AsyncClient
    options: GenerateOptions
    predicts: bool = False
    concurrent = True

    async def run(self, item: Item) -> Sample:
        """Time from the request to its completion; the caller fills in the repeat."""
        first, first_tokens = None, 0
        token_ids: list[int] = []
        options = self.options
        if self.predicts:
            options = replace(options, prediction=item.prediction)
        begin = time.perf_counter()
        events = self.client.generate([*item.prompt_token_ids] or item.prompt, options)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Chunk():
                        first = first or time.perf_counter() - begin
                        token_ids += event.token_ids
                        first_tokens = first_tokens or len(token_ids)
                    case Completion():
                        return Sample(
                            item.group, item.index, 0, self.name, time.perf_counter() - begin,
                            len(token_ids), token_ids, first, event.speculation, event.timings,
                            first_tokens=first_tokens,
                        )  # fmt: skip
        raise FlyspecError(f"{self.client.address} ended the stream without a completion")


class Answer(NamedTuple):
    """A completion by other software: its tokens by its own count, and times in seconds.

    `token_ids` are empty if only their number is known.
    """

    tokens: int
    seconds: float
    first_token_s: float | None
    token_ids: Sequence[int] = ()


Complete = Callable[[Sequence[int], int], Awaitable[Answer]]
"""Continues the tokens of a prompt by at most so many, greedily."""


@dataclass
class OtherMode:
    """Other software. If `concurrent`, it takes several requests at once."""

    name: str
    complete: Complete
    concurrent: bool

    async def run(self, item: Item) -> Sample:
        """Time a completion of plain decoding's length, by the software's own measurement."""
        done = await self.complete(item.prompt_token_ids, item.plain_tokens)
        return Sample(
            item.group, item.index, 0, self.name, done.seconds, done.tokens, done.token_ids,
            done.first_token_s,
        )  # fmt: skip


Mode = FlyspecMode | OtherMode


class Noise:
    """Random requests, one per slot of the services, that evict everything from their caches.

    They are sent one after another: right after concurrent requests, K auto would treat the next,
    measured request as concurrent, too. With 0 slots nothing is evicted.
    """

    def __init__(self, client: AsyncClient, vocab_size: int, num_slots: int) -> None:
        self._client, self._vocab_size, self._num_slots = client, vocab_size, num_slots
        self._rng = random.Random(1)

    async def fill(self) -> None:
        """Leave no prefix of a prompt in the caches of target and drafter."""
        for _ in range(self._num_slots):
            token_ids = [self._rng.randrange(self._vocab_size) for _ in range(_NOISE_TOKENS)]
            await self._client.complete(token_ids, _NOISE)
