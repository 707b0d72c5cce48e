"""How fast: plain decoding, the rules, and what others make of the same prompts, in turn.

All modes of a prompt run one after the other before the next prompt, in an order that rotates, and
prompts of all groups take turns, so that a machine whose speed drifts slows all of them alike.
Before each request to flyspec the services' caches are filled with noise, so that no mode profits
from another's prompt; not those of a running stack, which others may use. Many requests at once are
measured apart, in `measure_batches`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flyspec.bench.conditions import PLAIN, Condition, by_k
from flyspec.bench.modes import FlyspecMode, Item, Mode, Noise, Sample
from flyspec.bench.prompts import Group, in_turn, to_request
from flyspec.client import Client, GenerateOptions
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO, SpeculationLength

AGAIN = "plain again"
"""Plain decoding measured a second time: how much of a ratio is chance."""


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured. Several drafters, or Ks, make a mode of each rule for each.

    A drafter "" is the server's choice.
    """

    conditions: Sequence[Condition] = (
        Condition("exact", Rule("exact")),
        Condition("fly", Rule("fly")),
    )
    num_speculative_tokens: Sequence[SpeculationLength] = (AUTO,)
    max_tokens: int = 128
    repeats: int = 5
    drafters: Sequence[str] = ("",)
    chat: bool | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class BatchSample:
    """Requests at once: `batch` at any time, until all are done."""

    group: str
    batch: int
    repeat: int
    mode: str
    seconds: float
    tokens: int
    first_token_s: float

    @property
    def rate(self) -> float:
        """Tokens a second, of all together."""
        return self.tokens / self.seconds


def plain_options(options: SpeedOptions) -> GenerateOptions:
    """Plain decoding through the same services."""
    return GenerateOptions(
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        rule=Rule("exact"),
        num_speculative_tokens=0,
    )


def flyspec_modes(client: Client, options: SpeedOptions) -> list[FlyspecMode]:
    """Plain decoding first, then the conditions, at each K that is measured."""
    plain = plain_options(options)
    modes = [FlyspecMode(PLAIN, client, plain)]
    for condition in by_k(options.conditions, options.num_speculative_tokens):
        k = condition.requested_k(options.num_speculative_tokens[0])
        asked = replace(plain, rule=condition.rule, num_speculative_tokens=k)
        if condition.name == PLAIN:
            modes.append(FlyspecMode(AGAIN, client, asked))
            continue
        for drafter in options.drafters:
            name = _by_drafter(condition.name, drafter, options)
            modes.append(FlyspecMode(name, client, replace(asked, drafter=drafter)))
    return modes


def hindsight(options: SpeedOptions) -> dict[str, list[str]]:
    """Modes of each rule with fixed Ks, if there are several, by the name of the best of them."""
    fixed = [k for k in options.num_speculative_tokens if k != AUTO]
    if len(fixed) < 2:
        return {}
    return {
        _by_drafter(f"{c.name}, best fixed K", drafter, options): [
            PLAIN if k == 0 else _by_drafter(f"{c.name}, K {k}", drafter, options) for k in fixed
        ]
        for c in options.conditions
        if c.num_speculative_tokens is None
        for drafter in options.drafters
    }


def _by_drafter(name: str, drafter: str, options: SpeedOptions) -> str:
    """A mode's name, with the drafter where there are several."""
    return f"{name}, {drafter}" if len(options.drafters) > 1 else name


async def read_items(
    client: Client, groups: Sequence[Group], options: SpeedOptions
) -> list[list[Item]]:
    """The prompts of each group, and what plain decoding makes of each, which warms it up too."""
    plain = plain_options(options)
    found = []
    for group in groups:
        items = []
        for i, prompt in enumerate(group.prompts):
            request = to_request(prompt, options.chat)
            done = await client.complete(request, plain)
            items.append(
                Item(group.name, i, request, tuple(done.started.prompt_token_ids),
                     len(done.token_ids))
            )  # fmt: skip
        found.append(items)
    return found


async def measure(
    modes: Sequence[Mode],
    groups: Sequence[Group],
    items: Sequence[Sequence[Item]],
    repeats: int,
    noise: Noise,
    on_sample: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """One request at a time: every mode once to warm up, then all prompts `repeats` times."""
    for mode in modes:
        await mode.run(items[0][0])
    samples: list[Sample] = []
    for repeat in range(repeats):
        for visit, (g, i) in enumerate(in_turn(groups, repeat)):
            for mode in _rotated(modes, visit + repeat):
                if isinstance(mode, FlyspecMode):
                    await noise.fill()
                samples.append(replace(await mode.run(items[g][i]), repeat=repeat))
                on_sample()
    return samples


async def measure_batches(
    modes: Sequence[Mode],
    items: Sequence[Sequence[Item]],
    batches: Sequence[int],
    repeats: int,
    noise: Noise,
    on_sample: Callable[[], None] = lambda: None,
) -> list[BatchSample]:
    """So many requests at once, of modes that take them: each prompt, or as many as are at once."""
    modes = [mode for mode in modes if mode.concurrent]
    samples: list[BatchSample] = []
    turn = 0
    for repeat in range(-1, repeats):  # the first, of the largest batch alone, is to warm up
        for batch in batches if repeat >= 0 else batches[-1:]:
            for of in items:
                requests = [of[i % len(of)] for i in range(max(batch, len(of)))]
                for mode in _rotated(modes, turn):
                    await noise.fill()
                    sample = await _at_once(mode, requests, batch, repeat)
                    if repeat >= 0:
                        samples.append(sample)
                        on_sample()
                turn += repeat >= 0
    return samples


async def _at_once(mode: Mode, requests: Sequence[Item], batch: int, repeat: int) -> BatchSample:
    waiting = list(reversed(requests))
    done: list[Sample] = []

    async def work() -> None:
        while waiting:
            done.append(await mode.run(waiting.pop()))

    begin = time.perf_counter()
    workers = [asyncio.ensure_future(work()) for _ in range(batch)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    seconds = time.perf_counter() - begin
    firsts = sorted(s.first_token_s or 0.0 for s in done)
    tokens = sum(s.tokens for s in done)
    return BatchSample(requests[0].group, batch, repeat, mode.name, seconds, tokens,
                       firsts[len(firsts) // 2])  # fmt: skip


def _rotated(modes: Sequence[Any], turn: int) -> list[Any]:
    """In an order that begins elsewhere each turn, and every other time runs backwards."""
    start = (turn // 2) % len(modes)
    order = [*modes[start:], *modes[:start]]
    return order[::-1] if turn % 2 else order
