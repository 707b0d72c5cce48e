"""The runner: systems under test on the same prompts, in blocks that alternate.

All modes of a prompt run one after the other before the next prompt, in a rotating order, and
prompts of all groups take turns, so that a machine whose speed drifts slows all of them alike.
Other software is measured like that too, one after the other and each beside plain decoding alone.
Several requests at the same time are a set of a group's prompts, one mode after the other likewise.
Before each request to flyspec the services' caches are filled with noise, so that no mode profits
from another's prompt; except those of a running stack, which others may be using.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from flyspec.client import AsyncClient, GenerateOptions
from flyspec.concurrency import all_or_first_error
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.conditions import PLAIN, by_k
from flyspec_lab.bench.modes import FlyspecMode, Item, Mode, Noise, Sample
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.prompts import Group, in_turn
from flyspec_lab.interrupting import until_interrupted

V = TypeVar("V")

AGAIN = "plain again"
"""Plain decoding measured a second time: how much of a ratio is chance."""
REST_S = 0.01
"""Seconds before a request if other software is measured too: the threads of the server before may
still wait in a busy loop, on cores that are now another server's."""


@dataclass(frozen=True)
class BatchSample:
    """A set of requests, `batch` of them at any time."""

    group: str
    batch: int
    repeat: int
    mode: str
    seconds: float
    tokens: int
    first_token_s: float

    @property
    def rate(self) -> float:
        """Tokens per second, over all requests."""
        return self.tokens / self.seconds


def flyspec_modes(client: AsyncClient, options: SpeedOptions) -> list[FlyspecMode]:
    """Return plain decoding, then the rules at each K, by drafter, and also with predictions.

    Texts that are sampled are so with the same seed in all modes: the target draws the same tokens.
    """
    plain = GenerateOptions(
        sampling=SamplingParams(temperature=options.temperature),
        seed=0,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        rule=Rule("exact"),
        num_speculative_tokens=0,
        disable_loop_guard=options.makes_pair,  # random weights repeat themselves
    )
    modes = [FlyspecMode(PLAIN, client, plain)]
    for condition in by_k(options.rules, options.num_speculative_tokens):
        asked = replace(
            plain,
            rule=condition.rule,
            phases=condition.phases,
            num_speculative_tokens=condition.requested_k(options.num_speculative_tokens[0]),
        )
        if condition.name == PLAIN:
            modes.append(FlyspecMode(AGAIN, client, asked))
            continue
        for drafter in options.drafters:
            by = replace(asked, drafter=drafter)
            name = _by_drafter(condition.name, drafter, options)
            modes.append(FlyspecMode(name, client, by))
            if options.prediction:
                modes.append(FlyspecMode(f"{name}, prediction", client, by, predicts=True))
    return modes


def hindsight(options: SpeedOptions) -> dict[str, list[str]]:
    """Return each rule's modes with fixed Ks, if there are several, by the name of their best."""
    fixed = [k for k in options.num_speculative_tokens if k != AUTO]
    if len(fixed) < 2:
        return {}
    return {
        _by_drafter(f"{c.name}, best fixed K", drafter, options): [
            PLAIN if k == 0 else _by_drafter(f"{c.name}, K {k}", drafter, options) for k in fixed
        ]
        for c in options.rules
        if c.num_speculative_tokens is None
        for drafter in options.drafters
    }


def _by_drafter(name: str, drafter: str, options: SpeedOptions) -> str:
    """Append the drafter to a mode's name if there are several."""
    return f"{name}, {drafter}" if len(options.drafters) > 1 else name


async def read_items(
    plain: FlyspecMode, groups: Sequence[Group], chat: bool | None
) -> list[list[Item]]:
    """Decode every prompt plainly, for its tokens and its output; this also warms up the target."""
    found = []
    for group in groups:
        items = []
        for i, prompt in enumerate(group.prompts):
            request = prompt.to_request(chat)
            done = await plain.client.complete(request, plain.options)
            token_ids = tuple(done.started.prompt_token_ids)
            plain_tokens = len(done.token_ids)
            items.append(Item(group.name, i, request, token_ids, plain_tokens, prompt.prediction))
        found.append(items)
    return found


async def measure(
    modes: Sequence[Mode], items: Sequence[Sequence[Item]], repeats: int, noise: Noise
) -> list[Sample]:
    """Run all prompts `repeats` times in every mode, one request at a time.

    If interrupted, returns what was measured in all modes until then; so does `measure_batches`.
    """
    samples: list[Sample] = []
    rest_s = 0.0 if all(isinstance(mode, FlyspecMode) for mode in modes) else REST_S
    sizes = [len(group) for group in items]
    with progress("measuring", repeats * sum(sizes) * len(modes)) as advance, until_interrupted():
        for repeat in range(repeats):
            for visit, (g, i) in enumerate(in_turn(sizes, repeat)):
                for mode in _rotated(modes, visit + repeat):
                    if isinstance(mode, FlyspecMode):
                        await noise.fill()
                    await asyncio.sleep(rest_s)
                    samples.append(replace(await mode.run(items[g][i]), repeat=repeat))
                    advance()
    return _whole(samples, len(modes))


def _whole(samples: list[V], number: int) -> list[V]:
    """Drop samples that do not make up `number`."""
    return samples[: len(samples) - len(samples) % number]


async def measure_batches(
    modes: Sequence[Mode],
    items: Sequence[Sequence[Item]],
    batches: Sequence[int],
    repeats: int,
    noise: Noise,
) -> list[BatchSample]:
    """Run concurrent requests in the modes that can: each prompt once, or `batch` prompts if more.

    An uncounted run of the largest batch comes first.
    """
    modes = [mode for mode in modes if mode.concurrent]
    samples: list[BatchSample] = []
    total = repeats * len(batches) * len(items) * len(modes)
    with progress("measuring concurrent requests", total) as advance, until_interrupted():
        for mode, of in product(modes, items):
            await noise.fill()
            await _run_batch(mode, of, batches[-1])
        for turn, (repeat, batch, of) in enumerate(product(range(repeats), batches, items)):
            for mode in _rotated(modes, turn):
                await noise.fill()
                begin = time.perf_counter()
                done = await _run_batch(mode, of, batch)
                seconds = time.perf_counter() - begin
                firsts = sorted(s.first_token_s or 0.0 for s in done)
                samples.append(BatchSample(
                    of[0].group, batch, repeat, mode.name, seconds,
                    sum(s.tokens for s in done), firsts[len(firsts) // 2],
                ))  # fmt: skip
                advance()
    return _whole(samples, len(modes))


async def _run_batch(mode: Mode, items: Sequence[Item], batch: int) -> list[Sample]:
    """Run each prompt once, or `batch` prompts if there are fewer, `batch` of them at any time."""
    waiting = [items[i % len(items)] for i in range(max(batch, len(items)))][::-1]
    done: list[Sample] = []

    async def work() -> None:
        while waiting:
            done.append(await mode.run(waiting.pop()))

    await all_or_first_error(work() for _ in range(batch))
    return done


def _rotated(modes: Sequence[Any], turn: int) -> list[Any]:
    """Return them in an order that starts elsewhere each turn and is reversed every other time."""
    start = (turn // 2) % len(modes)
    order = [*modes[start:], *modes[:start]]
    return order[::-1] if turn % 2 else order
