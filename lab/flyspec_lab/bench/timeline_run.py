"""Traced rounds, with bare echoes between them: the input of `flyspec_lab.bench.timeline`."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flyspec.client import AsyncClient
from flyspec.concurrency import check_reached, until_interrupted
from flyspec.progress import progress
from flyspec.telemetry.traces import traceparent_of, wall_ns
from flyspec.values.generation import Chunk, Completion
from flyspec.values.requests import GenerateOptions, Prompt
from flyspec_lab.bench.options import RoundOptions
from flyspec_lab.bench.prompts import fresh_requests
from flyspec_lab.bench.transport import Echoes, Exchanges, Leg, echoes, exchanges

_ECHO_ROUNDS = 20
_LEAST_BYTES = 16


@dataclass
class TracedRun:
    """Arrival times of the chunks of traced generations, by trace id, in ns since 1970.

    `overheads_ns` are of untraced generations: the median time of a round outside both models.
    """

    chunks_ns: dict[str, list[int]] = field(default_factory=dict)
    overheads_ns: list[int] = field(default_factory=list)
    echoes_ns: list[int] = field(default_factory=list)
    exchanges_ns: list[int] = field(default_factory=list)
    legs: tuple[Leg, ...] = ()


async def run(client: AsyncClient, o: RoundOptions) -> TracedRun:
    """Run every prompt once to warm up, then `repeats` times traced, untraced, and echoed.

    The work of both kinds of echoes is as long as the models' in the warm-up's rounds; the bare
    ones' messages are as long as a round's. If interrupted, returns what was measured until then.
    """
    prompts = fresh_requests(o.problems, o.problem_seed)
    options = GenerateOptions(
        max_tokens=o.max_tokens,
        drafter=o.drafter,
        rule=o.rule.rule,
        phases=o.rule.phases,
        num_speculative_tokens=o.num_speculative_tokens,
    )
    done = TracedRun()
    total = len(prompts) * (o.repeats + 1)
    async with echoes(2) as bare, exchanges() as typed:
        with progress("measuring", total) as advance:
            warm = []
            for prompt in prompts:
                _, _, completion = await _generate(client, prompt, options)
                warm.append(completion)
                advance()
            done.legs = _legs(warm)
            with until_interrupted():
                for prompt in prompts * o.repeats:
                    await _trace(client, prompt, options, done, (bare, typed))
                    advance()
    check_reached(done.exchanges_ns)
    return done


async def _trace(
    client: AsyncClient,
    prompt: Prompt,
    options: GenerateOptions,
    done: TracedRun,
    ways: tuple[Echoes, Exchanges],
) -> None:
    """Generate with a trace and without, then echo; add the times to `done`."""
    trace_id, chunks, _ = await _generate(client, prompt, options)
    _, _, untraced = await _generate(client, prompt, options, traced=False)
    found = []
    for way in ways:
        took = [await way.outside_ns(done.legs) for _ in range(_ECHO_ROUNDS)]
        found.append(took[2:])  # the first ones find the processes asleep
    done.chunks_ns[trace_id] = chunks
    if overhead_ns := untraced.timings.round_overhead_p50_ns:
        done.overheads_ns.append(overhead_ns)
    done.echoes_ns += found[0]
    done.exchanges_ns += found[1]


def text_times_ns(chunks_ns: Sequence[int], ends_ns: Sequence[int]) -> list[int]:
    """Return the times from each round's end to its chunk, if there is one chunk per round."""
    if len(chunks_ns) != len(ends_ns):
        return []
    return [chunk - end for chunk, end in zip(chunks_ns, ends_ns, strict=True) if chunk >= end]


async def _generate(
    client: AsyncClient, prompt: Prompt, options: GenerateOptions, traced: bool = True
) -> tuple[str, list[int], Completion]:
    """Return the trace id, the arrival times of the chunks, and the completion."""
    trace = uuid.uuid4()
    chunks: list[int] = []
    parent = traceparent_of(trace.int, 1)
    if not traced:
        parent = f"{parent[:-2]}00"  # W3C: not sampled by the caller, so by no service
    async for event in client.generate(prompt, replace(options, traceparent=parent)):
        if isinstance(event, Chunk):
            chunks.append(wall_ns(time.perf_counter_ns()))
        elif isinstance(event, Completion):
            return trace.hex, chunks, event
    raise AssertionError("a generation ends with its completion")


def _legs(completions: Sequence[Completion]) -> tuple[Leg, ...]:
    """Return two round trips like a round's to drafter and target, its bytes spread evenly."""

    def typical(of: Callable[[Completion], float]) -> int:
        return int(statistics.median(map(of, completions)))

    size = max(_LEAST_BYTES, typical(
        lambda c: c.speculation.round_bytes / max(1, c.speculation.num_rounds) / 4))  # fmt: skip
    return tuple(
        Leg(size, size, max(1, typical(work)))
        for work in (
            lambda c: c.timings.draft_model_ns / max(1, c.speculation.num_spec_steps),
            lambda c: c.timings.target_model_ns / max(1, c.speculation.num_rounds),
        )
    )
