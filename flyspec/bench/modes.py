"""Ways to continue a prompt, each timed alike: through the services, by transformers, by others."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from flyspec.bench.openai import OpenAIServer
from flyspec.bench.peer_worker import PeerSetup
from flyspec.bench.peers import PeerProcess
from flyspec.client import Chunk, Client, Completion, GenerateOptions, Prompt, Started
from flyspec.errors import FlyspecError
from flyspec.rules import Rule

_NOISE_TOKENS = 24


@dataclass(frozen=True)
class Sample:
    """One generation: what it took, and what speculation did.

    `token_ids` are empty where only their number is known; `chosen` is the mode that hindsight
    chose.
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

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Item:
    """A prompt of a group: as it is sent, its tokens, and how many plain decoding gave."""

    group: str
    index: int
    prompt: Prompt
    prompt_token_ids: Sequence[int]
    plain_tokens: int


class Mode(Protocol):
    """A way to continue a prompt. `concurrent`: several at once are as good as one."""

    concurrent: bool

    @property
    def name(self) -> str:
        """As reports call it."""
        ...

    async def run(self, item: Item) -> Sample:
        """Continue it; the repeat is filled in by who asks."""
        ...


class FlyspecMode:
    """Through the services, as a request of these options."""

    concurrent = True

    def __init__(self, name: str, client: Client, options: GenerateOptions) -> None:
        self.name, self._client, self._options = name, client, options

    async def run(self, item: Item) -> Sample:
        """From the request to its completion; the first token is there with its chunk."""
        first = None
        token_ids: list[int] = []
        prompt_tokens = 0
        begin = time.perf_counter()
        events = self._client.generate(item.prompt, self._options)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        prompt_tokens = len(event.prompt_token_ids)
                    case Chunk():
                        first = first or time.perf_counter() - begin
                        token_ids += event.token_ids
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
                        )  # fmt: skip
        raise FlyspecError(f"{self._client.address} ended the stream without a completion")


@dataclass
class PeerMode:
    """transformers, in its own process, as it was calibrated."""

    name: str
    process: PeerProcess
    setup: PeerSetup
    max_tokens: int
    ignore_eos: bool
    concurrent: bool = False

    async def run(self, item: Item) -> Sample:
        """The time that `generate` took, by its own process's clock."""
        answer = await self.process.generate(
            self.setup, item.prompt_token_ids, self.max_tokens, self.ignore_eos
        )
        return Sample(
            item.group, item.index, 0, self.name, answer.seconds, len(answer.token_ids),
            answer.token_ids, answer.first_token_s, len(item.prompt_token_ids),
        )  # fmt: skip


@dataclass
class AgainstMode:
    """Another server, on the same prompt, for as many tokens."""

    server: OpenAIServer
    concurrent: bool = True

    @property
    def name(self) -> str:
        """As `--against` calls it."""
        return self.server.name

    async def run(self, item: Item) -> Sample:
        """From the request to the end of the stream."""
        done = await self.server.complete(item.prompt_token_ids, item.plain_tokens)
        return Sample(
            item.group, item.index, 0, self.name, done.seconds, done.tokens, (),
            done.first_token_s, len(item.prompt_token_ids),
        )  # fmt: skip


class Noise:
    """Random requests, one for each slot of the services, that evict whatever is cached.

    Sent one after another: right after concurrent requests K auto would treat the measured one as
    concurrent, too. Without slots there is nothing to evict.
    """

    def __init__(self, client: Client, vocab_size: int, num_slots: int) -> None:
        self._client, self._vocab_size, self._num_slots = client, vocab_size, num_slots
        self._rng = random.Random(1)

    async def fill(self) -> None:
        """Leave nothing in the caches of either model that a prompt could begin with."""
        options = GenerateOptions(
            max_tokens=2, rule=Rule("exact"), num_speculative_tokens=1, ignore_eos=True
        )
        for _ in range(self._num_slots):
            token_ids = [self._rng.randrange(self._vocab_size) for _ in range(_NOISE_TOKENS)]
            await self._client.complete(token_ids, options)
