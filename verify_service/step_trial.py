"""Times the target's steps by their number of tokens, at start, before requests come."""

from __future__ import annotations

from time import perf_counter_ns

from flyspec.engine.model import Model, Step
from flyspec.values.admin import MeasuredStep

SIZES = (1, 32, 8, 16, 4, 24, 2, 64, 48)
"""In order of use: what a slow target has no time for is taken to be on a line between these."""
NEEDED = 3
"""Of the sizes, those that are measured however long it takes."""
CONTEXT = 64
"""Tokens that each step builds on."""
REPEATS, ENOUGH = 6, 2
"""Times that each size is measured, and what is enough: the first step of a size may be slow."""
MOST_NS = 400_000_000
"""What is not needed and not measured by then is not."""


def measure_steps(model: Model) -> tuple[MeasuredStep, ...]:
    """What a round of one sequence takes, forward alone; never less for more tokens.

    The shortest of some: other services start on the same machine, and ratios are what counts.
    """
    cache, info = model.cache, model.info
    context = min(CONTEXT, info.context_length - max(SIZES))
    if context < 1:
        return ()
    ids = [(7 * i * i + 3 * i + 1) % min(info.vocab_size, 251) for i in range(max(SIZES) + context)]
    until = perf_counter_ns() + MOST_NS
    times: dict[int, list[int]] = {}
    slot = cache.acquire().slot
    try:
        model.forward([Step(slot, 0, ids[:context], 0)])
        for repeat in range(REPEATS):
            for rank, size in enumerate(SIZES):
                needed = rank < NEEDED and repeat < ENOUGH
                if not needed and perf_counter_ns() > until:
                    break
                step = Step(slot, context, ids[context : context + size], size)
                began = perf_counter_ns()
                model.forward([step])
                model.synchronize()
                times.setdefault(size, []).append(perf_counter_ns() - began)
    finally:
        cache.release(slot)
        cache.forget()
    found: list[MeasuredStep] = []
    for size in sorted(size for size in times if len(times[size]) >= ENOUGH):
        least = found[-1].duration_ns if found else 0
        found.append(MeasuredStep(size, max(least, min(times[size]))))
    return tuple(found)
