"""Ways to continue a prompt, all timed alike: the services, transformers, other servers."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from flyspec.client import AsyncClient, Chunk, Completion, GenerateOptions, Prompt, Started
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.tokens import Origin
from flyspec_lab.bench.openai import StreamedCompletion
from flyspec_lab.bench.peers import PeerAnswer

_NOISE_TOKENS = 24


@dataclass(frozen=True)
class Sample:
    """One generation: its time, and what speculation did.

    `token_ids` are empty if only their number is known, as are their `origins`. `chosen` is the
    mode that hindsight chose. Of `total_ns`, the orchestrator's time for the request, `opening_ns`
    went by until the end of the first round, part of it in the models.
    """

    group: str
    prompt: int
    repeat: int
    mode: str
    seconds: float
    tokens: int
    token_ids: Sequence[int] = ()
    first_token_s: float | None = None
    prompt_tokens: int = 0
    rounds: int = 0
    spec_steps: int = 0
    accepted: int = 0
    loose: int = 0
    loose_cost_nats: float = 0.0
    overhead_ns: int = 0
    target_ns: int = 0
    draft_ns: int = 0
    chosen: str = ""
    drafted: int = 0
    round_bytes: int = 0
    distribution_bytes: int = 0
    judge_ns: int = 0
    drafter: str = ""
    origins: Sequence[Origin] = ()
    total_ns: int = 0
    opening_ns: int = 0
    opening_draft_ns: int = 0
    opening_target_ns: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Item:
    """A prompt of a group, with plain decoding's number of output tokens.

    All modes get its tokens where they are known: other software does not know the chat template.
    """

    group: str
    index: int
    prompt: Prompt
    prompt_token_ids: Sequence[int] = ()
    plain_tokens: int = 0


class FlyspecMode:
    """The services, with fixed request options. `concurrent`: it takes several requests at once."""

    concurrent = True

    def __init__(self, name: str, client: AsyncClient, options: GenerateOptions) -> None:
        self.name, self._client, self.options = name, client, options

    async def run(self, item: Item) -> Sample:
        """Time from the request to its completion; the caller fills in the repeat."""
        first = None
        token_ids: list[int] = []
        origins: list[Origin] = []
        prompt_tokens, drafter = 0, ""
        begin = time.perf_counter()
        events = self._client.generate([*item.prompt_token_ids] or item.prompt, self.options)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        prompt_tokens, drafter = len(event.prompt_token_ids), event.drafter
                    case Chunk():
                        first = first or time.perf_counter() - begin
                        token_ids += event.token_ids
                        origins += event.origins
                    case Completion():
                        m, t = event.speculation, event.timings
                        return Sample(
                            item.group, item.index, 0, self.name,
                            seconds=time.perf_counter() - begin,
                            tokens=len(token_ids),
                            token_ids=token_ids,
                            first_token_s=first,
                            prompt_tokens=prompt_tokens,
                            rounds=m.num_rounds,
                            spec_steps=m.num_spec_steps,
                            accepted=m.num_accepted_draft_tokens,
                            loose=m.num_loose_tokens,
                            loose_cost_nats=m.loose_cost_nats,
                            overhead_ns=t.round_overhead_p50_ns,
                            target_ns=t.target_model_ns,
                            draft_ns=t.draft_model_ns,
                            judge_ns=t.judge_ns,
                            drafted=m.num_draft_tokens,
                            round_bytes=m.round_bytes,
                            distribution_bytes=m.distribution_bytes,
                            drafter=drafter,
                            origins=origins,
                            total_ns=t.total_ns,
                            opening_ns=t.opening_ns,
                            opening_draft_ns=t.opening_draft_model_ns,
                            opening_target_ns=t.opening_target_model_ns,
                        )  # fmt: skip
        raise FlyspecError(f"{self._client.address} ended the stream without a completion")


@dataclass
class OtherMode:
    """Other software: `complete` continues an item's tokens, and returns their number and times."""

    name: str
    complete: Callable[[Item], Awaitable[PeerAnswer | StreamedCompletion]]
    concurrent: bool

    async def run(self, item: Item) -> Sample:
        """Time the completion, by the software's own measurement."""
        done = await self.complete(item)
        return Sample(
            item.group, item.index, 0, self.name, done.seconds, done.tokens, done.token_ids,
            done.first_token_s, len(item.prompt_token_ids),
        )  # fmt: skip


Mode = FlyspecMode | OtherMode


class Noise:
    """Random requests, one per slot of the services, that evict everything from their caches.

    They are sent one after another: right after concurrent requests, K auto would treat the next,
    measured request as concurrent, too. With 0 slots nothing is evicted. `drafters` are those with
    a cache each; "" is the server's own.
    """

    def __init__(
        self, client: AsyncClient, vocab_size: int, num_slots: int, drafters: Sequence[str] = ("",)
    ) -> None:
        self._client, self._vocab_size, self._num_slots = client, vocab_size, num_slots
        self._drafters = drafters
        self._rng = random.Random(1)

    async def fill(self) -> None:
        """Leave no prefix of a prompt in the caches of target and drafters."""
        options = GenerateOptions(
            max_tokens=2, rule=Rule("exact"), num_speculative_tokens=1, ignore_eos=True
        )
        for drafter in self._drafters:
            for _ in range(self._num_slots):
                token_ids = [self._rng.randrange(self._vocab_size) for _ in range(_NOISE_TOKENS)]
                await self._client.complete(token_ids, replace(options, drafter=drafter))
