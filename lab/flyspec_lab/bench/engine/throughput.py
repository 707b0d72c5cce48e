"""Gain from concurrency: N requests at a time against the same N one after another.

Through the whole stack. For every N the two runs follow each other, and everything is repeated in
rotating orders, so that a machine whose speed drifts slows both alike; ratios are taken within a
pair, then their median. Every pair has new prompts, and before each run the services' caches are
filled with noise, so that neither run profits from the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flyspec.client import AdminClient, AsyncClient, GenerateOptions
from flyspec.concurrency import until_interrupted
from flyspec.progress import progress
from flyspec_lab.bench.modes import FlyspecMode, Item, Noise, Sample
from flyspec_lab.bench.options import ThroughputOptions
from flyspec_lab.bench.prompts import fresh_requests
from flyspec_lab.bench.speed import run_batch, whole
from flyspec_lab.bench.summaries import grouped


@dataclass(frozen=True)
class LevelSample:
    """N requests, concurrent or one after another."""

    concurrency: int
    repeat: int
    at_once: bool
    seconds: float
    generations: Sequence[Sample]
    prefix_hit_rate: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, over all requests."""
        return self.total("tokens") / self.seconds

    def total(self, name: str) -> float:
        found: float = sum(getattr(g, name) for g in self.generations)
        return found


@dataclass(frozen=True)
class LevelReport:
    """N concurrent requests, compared with the same N one after another.

    `speedup` is the median over the repeats of the ratio of their rates, `lowest_speedup` the
    minimum. Batches are the mean number of requests in a step of the target or the draft model,
    over the whole time, where idle time counts as 0. Times per output token are over all requests
    of all repeats: from the first piece of the output to its end, divided by its tokens minus 1.
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


async def measure(
    client: AsyncClient, admin: AdminClient, vocab_size: int, o: ThroughputOptions
) -> list[LevelSample]:
    """Run the largest N to warm up, then every N both ways, `repeats` times.

    If interrupted, returns what was measured both ways until then.
    """
    mode = FlyspecMode(
        o.rule.name,
        client,
        GenerateOptions(
            max_tokens=o.max_tokens,
            ignore_eos=o.ignore_eos,
            drafter=o.drafter,
            rule=o.rule.rule,
            phases=o.rule.phases,
            num_speculative_tokens=o.num_speculative_tokens,
        ),
    )
    status, levels = await admin.status(), o.concurrency
    slots = max(status.verify.sessions.limit, status.draft.sessions.limit)
    noise = Noise(client, vocab_size, slots)
    await run_batch(mode, _items(max(levels), o.problem_seed), max(levels))
    samples: list[LevelSample] = []
    total = 2 * len(levels) * o.repeats
    with progress("measuring", total) as advance, until_interrupted():
        for repeat in range(o.repeats):
            turn = repeat % len(levels)
            for index in [*range(turn, len(levels)), *range(turn)]:
                n = levels[index]
                items = _items(n, o.problem_seed + 1 + repeat * len(levels) + index)
                for at_once in (True, False) if (repeat + index) % 2 else (False, True):
                    await noise.fill()
                    before = (await admin.status()).verify.sessions
                    seconds, done = await run_batch(mode, items, n if at_once else 1)
                    after = (await admin.status()).verify.sessions
                    queries = after.prefix_cache_queries - before.prefix_cache_queries
                    hits = after.prefix_cache_hits - before.prefix_cache_hits
                    hit_rate = hits / max(1, queries)
                    samples.append(LevelSample(n, repeat, at_once, seconds, done, hit_rate))
                    advance()
    return whole(samples, 2)


def _items(number: int, seed: int) -> list[Item]:
    prompts = fresh_requests(number, seed)
    return [Item("word problems", i, prompt) for i, prompt in enumerate(prompts)]


def report(samples: Sequence[LevelSample]) -> list[LevelReport]:
    levels = grouped(samples, lambda s: s.concurrency)
    return [_report_level(n, levels[n]) for n in sorted(levels)]


def _report_level(concurrency: int, samples: Sequence[LevelSample]) -> LevelReport:
    together = {s.repeat: s for s in samples if s.at_once}
    alone = {s.repeat: s for s in samples if not s.at_once}
    speedups = [together[repeat].rate / alone[repeat].rate for repeat in together]
    many = list(together.values())
    per_token = sorted(_times_per_token_ms(many))
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
            _times_per_token_ms(alone.values())
        ),
        time_to_first_token_p50_ms=statistics.median(
            1e3 * (g.first_token_s or 0.0) for s in many for g in s.generations
        ),
        mean_target_batch=sum(s.total("target_ns") for s in many) / wall_ns,
        mean_draft_batch=sum(s.total("draft_ns") for s in many) / wall_ns,
        mean_accepted_tokens=(
            sum(s.total("tokens") for s in many) / max(1, sum(s.total("rounds") for s in many))
        ),
        prefix_hit_rate=max(s.prefix_hit_rate for s in samples),
    )


def _times_per_token_ms(samples: Iterable[LevelSample]) -> list[float]:
    return [
        1e3 * (g.seconds - (g.first_token_s or 0.0)) / max(1, g.tokens - 1)
        for s in samples
        for g in s.generations
    ]
