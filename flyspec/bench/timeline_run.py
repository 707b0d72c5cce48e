"""Rounds that are traced, with bare echoes between them: what `flyspec.bench.timeline` reads."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flyspec.bench.exchanges import Exchanges
from flyspec.bench.transport import Echoes, Leg
from flyspec.client import Client
from flyspec.telemetry.traces import traceparent_of, wall_ns
from flyspec.values.generation import Chunk, Completion, GenerateOptions, Prompt

_ECHO_ROUNDS = 20
_LEAST_BYTES = 16


@dataclass
class TracedRun:
    """What was done: the traced generations by id, with when each chunk came (ns since 1970).

    `overheads_ns` are of the others, of each the median of a round's time outside both models.
    """

    chunks_ns: dict[str, list[int]] = field(default_factory=dict)
    overheads_ns: list[int] = field(default_factory=list)
    echoes_ns: list[int] = field(default_factory=list)
    exchanges_ns: list[int] = field(default_factory=list)
    legs: tuple[Leg, ...] = ()


async def run(
    client: Client,
    echoes: Echoes,
    exchanges: Exchanges,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    repeats: int,
    on_sample: Callable[[], None] = lambda: None,
) -> TracedRun:
    """Every prompt once to warm up, then `repeats` times traced, not traced, and echoed, in turn.

    The work of both kinds of echoes is as long as the models' in a round was while warming up; the
    bare ones' messages are as long as a round's.
    """
    done = TracedRun()
    warm = []
    for prompt in prompts:
        _, _, completion = await _generate(client, prompt, options)
        warm.append(completion)
        on_sample()
    done.legs = _legs(warm)
    for _ in range(repeats):
        for prompt in prompts:
            trace_id, chunks, _ = await _generate(client, prompt, options)
            done.chunks_ns[trace_id] = chunks
            _, _, untraced = await _generate(client, prompt, options, traced=False)
            if overhead_ns := untraced.timings.round_overhead_p50_ns:
                done.overheads_ns.append(overhead_ns)
            for ways, times in ((echoes, done.echoes_ns), (exchanges, done.exchanges_ns)):
                took = [await ways.outside_ns(done.legs) for _ in range(_ECHO_ROUNDS)]
                times += took[2:]  # the first find the processes asleep
            on_sample()
    return done


def count(num_prompts: int, repeats: int) -> int:
    """How many times `run` calls `on_sample`."""
    return num_prompts * (repeats + 1)


def text_times_ns(chunks_ns: Sequence[int], ends_ns: Sequence[int]) -> list[int]:
    """From each round's end to its chunk; nothing where they cannot be told one from the other."""
    if len(chunks_ns) != len(ends_ns):
        return []
    return [chunk - end for chunk, end in zip(chunks_ns, ends_ns, strict=True) if chunk >= end]


async def _generate(
    client: Client, prompt: Prompt, options: GenerateOptions, traced: bool = True
) -> tuple[str, list[int], Completion]:
    """The trace's id, when chunks came, the completion."""
    trace = uuid.uuid4()
    chunks: list[int] = []
    parent = traceparent_of(trace.int, 1)
    if not traced:
        parent = f"{parent[:-2]}00"  # W3C: the caller keeps no trace, so nobody does
    async for event in client.generate(prompt, replace(options, traceparent=parent)):
        if isinstance(event, Chunk):
            chunks.append(wall_ns(time.perf_counter_ns()))
        elif isinstance(event, Completion):
            return trace.hex, chunks, event
    raise AssertionError("a generation ends with its completion")


def _legs(completions: Sequence[Completion]) -> tuple[Leg, ...]:
    """Two round trips as the drafter's and the target's of a round, their bytes spread evenly."""

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
