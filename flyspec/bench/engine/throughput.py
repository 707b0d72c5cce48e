"""What many requests at once gain: N together against the same N one after another.

Through the whole stack. Both ways follow each other for every N and are repeated, in orders that
rotate, so that a machine whose speed drifts slows them alike; ratios are taken a pair, then their
median. Every pair has prompts that were never seen, and before each run the services' caches are
filled with noise, so that no prompt is found in them: neither way profits from the other.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flyspec.bench.prompts import DEFAULT_SEED, fresh_problems, to_request
from flyspec.client import AdminClient, Client, GenerateOptions, Generation, Prompt
from flyspec.rules import Rule

_NOISE_TOKENS = 24
_NOISE_AT_ONCE = 8


@dataclass(frozen=True)
class ThroughputOptions:
    """What is measured, on word problems. Outputs end where they end, or with `ignore_eos` at
    `max_tokens`."""

    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32)
    rule: Rule = field(default_factory=lambda: Rule("exact"))
    num_speculative_tokens: int = 8
    max_tokens: int = 96
    ignore_eos: bool = False
    repeats: int = 3
    drafter: str = ""
    problem_seed: int = DEFAULT_SEED


@dataclass(frozen=True)
class LevelSample:
    """N requests, at once or one after another. Sequences have a value a request.

    `target_ns` and `draft_ns`: time that the requests spent in steps of the models, summed.
    """

    concurrency: int
    repeat: int
    at_once: bool
    seconds: float
    tokens: int
    rounds: int
    target_ns: int
    draft_ns: int
    time_per_output_token_ms: Sequence[float]
    time_to_first_token_ms: Sequence[float]
    prefix_hit_rate: float

    @property
    def rate(self) -> float:
        """Tokens a second, of all requests together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class LevelReport:
    """N requests at once, against the same N one after another.

    `speedup` is the median over the repeats of the ratio of their rates, `lowest_speedup` the
    least. Batches are the mean number of requests in a step of the target, or of the draft model,
    over the whole time, idle time being 0. Times a token are over all requests of all repeats:
    from the first piece of the output to its end, over its tokens less one.
    """

    concurrency: int
    tokens_per_second: float
    sequential_tokens_per_second: float
    speedup: float
    lowest_speedup: float
    time_per_output_token_p50_ms: float
    time_per_output_token_p99_ms: float
    sequential_time_per_output_token_p50_ms: float
    time_to_first_token_p50_ms: float
    mean_target_batch: float
    mean_draft_batch: float
    mean_accepted_tokens: float
    prefix_hit_rate: float


def count(options: ThroughputOptions) -> int:
    """How many times `measure` calls `on_sample`."""
    return 2 * len(options.concurrency) * options.repeats


async def measure(
    client: Client,
    admin: AdminClient,
    options: ThroughputOptions,
    on_sample: Callable[[], None] = lambda: None,
) -> list[LevelSample]:
    """Run the most requests at once to warm up, then every N both ways, `repeats` times."""
    request = GenerateOptions(
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        drafter=options.drafter,
        rule=options.rule,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    status = await admin.status()
    noise = _Noise(client, (await client.list_models()).target.vocab_size,
                   max(status.verify.sessions.limit, status.draft.sessions.limit))  # fmt: skip
    levels = options.concurrency
    await _at_once(client, _prompts(max(levels), options.problem_seed), request)
    samples = []
    for repeat in range(options.repeats):
        turn = repeat % len(levels)
        for index in [*range(turn, len(levels)), *range(turn)]:
            number = 1 + repeat * len(levels) + index
            prompts = _prompts(levels[index], options.problem_seed + number)
            for at_once in (True, False) if (repeat + index) % 2 else (False, True):
                await noise.fill()
                before = (await admin.status()).verify.sessions
                begin = time.perf_counter()
                run = _at_once if at_once else _one_by_one
                generations = await run(client, prompts, request)
                seconds = time.perf_counter() - begin
                after = (await admin.status()).verify.sessions
                queries = after.prefix_cache_queries - before.prefix_cache_queries
                hits = after.prefix_cache_hits - before.prefix_cache_hits
                hit_rate = hits / max(1, queries)
                samples.append(
                    _sample(levels[index], repeat, at_once, seconds, generations, hit_rate)
                )
                on_sample()
    return samples


def report(samples: Sequence[LevelSample]) -> list[LevelReport]:
    """One report for each N, in increasing order."""
    return [
        _report_level(n, [s for s in samples if s.concurrency == n])
        for n in sorted({s.concurrency for s in samples})
    ]


def to_document(
    reports: Sequence[LevelReport], samples: Sequence[LevelSample] = (), **facts: Any
) -> dict[str, Any]:
    """The report as JSON; with `samples`, every run as well."""
    document = {**facts, "levels": [asdict(r) for r in reports]}
    return {**document, "samples": [asdict(s) for s in samples]} if samples else document


class _Noise:
    """Requests of random tokens, as many as the services have slots: what is cached is given up."""

    def __init__(self, client: Client, vocab_size: int, num_slots: int) -> None:
        self._client, self._vocab_size, self._num_slots = client, vocab_size, num_slots
        self._rng = random.Random(1)

    async def fill(self) -> None:
        """Leave nothing in the caches that a prompt could begin with."""
        options = GenerateOptions(max_tokens=2, rule=Rule("exact"), num_speculative_tokens=1)
        gate = asyncio.Semaphore(_NOISE_AT_ONCE)

        async def one() -> None:
            token_ids = [self._rng.randrange(self._vocab_size) for _ in range(_NOISE_TOKENS)]
            async with gate:
                await self._client.complete(token_ids, replace(options, ignore_eos=True))

        await asyncio.gather(*(one() for _ in range(self._num_slots)))


def _prompts(number: int, seed: int) -> list[Prompt]:
    return [to_request(prompt, None) for prompt in fresh_problems(number, seed).prompts]


async def _at_once(
    client: Client, prompts: Sequence[Prompt], request: GenerateOptions
) -> list[Generation]:
    return list(await asyncio.gather(*(client.complete(prompt, request) for prompt in prompts)))


async def _one_by_one(
    client: Client, prompts: Sequence[Prompt], request: GenerateOptions
) -> list[Generation]:
    return [await client.complete(prompt, request) for prompt in prompts]


def _sample(
    concurrency: int,
    repeat: int,
    at_once: bool,
    seconds: float,
    generations: Sequence[Generation],
    hit_rate: float,
) -> LevelSample:
    done = [g.completion for g in generations]
    return LevelSample(
        concurrency=concurrency,
        repeat=repeat,
        at_once=at_once,
        seconds=seconds,
        tokens=sum(c.completion_tokens for c in done),
        rounds=sum(c.speculation.num_rounds for c in done),
        target_ns=sum(c.timings.target_model_ns for c in done),
        draft_ns=sum(c.timings.draft_model_ns for c in done),
        time_per_output_token_ms=[
            (c.timings.total_ns - c.timings.time_to_first_token_ns)
            / 1e6
            / max(1, c.completion_tokens - 1)
            for c in done
        ],
        time_to_first_token_ms=[c.timings.time_to_first_token_ns / 1e6 for c in done],
        prefix_hit_rate=hit_rate,
    )


def _report_level(concurrency: int, samples: Sequence[LevelSample]) -> LevelReport:
    together = {s.repeat: s for s in samples if s.at_once}
    alone = {s.repeat: s for s in samples if not s.at_once}
    speedups = [together[repeat].rate / alone[repeat].rate for repeat in together]
    many = list(together.values())
    per_token = sorted(t for s in many for t in s.time_per_output_token_ms)
    wall_ns = 1e9 * sum(s.seconds for s in many)
    return LevelReport(
        concurrency=concurrency,
        tokens_per_second=statistics.median(s.rate for s in many),
        sequential_tokens_per_second=statistics.median(s.rate for s in alone.values()),
        speedup=statistics.median(speedups),
        lowest_speedup=min(speedups),
        time_per_output_token_p50_ms=statistics.median(per_token),
        time_per_output_token_p99_ms=per_token[round(0.99 * (len(per_token) - 1))],
        sequential_time_per_output_token_p50_ms=statistics.median(
            t for s in alone.values() for t in s.time_per_output_token_ms
        ),
        time_to_first_token_p50_ms=statistics.median(
            t for s in many for t in s.time_to_first_token_ms
        ),
        mean_target_batch=sum(s.target_ns for s in many) / wall_ns,
        mean_draft_batch=sum(s.draft_ns for s in many) / wall_ns,
        mean_accepted_tokens=sum(s.tokens for s in many) / max(1, sum(s.rounds for s in many)),
        prefix_hit_rate=max(s.prefix_hit_rate for s in samples),
    )
