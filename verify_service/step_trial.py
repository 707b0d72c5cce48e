"""Measures the target's step times by number of tokens, at startup, before requests arrive."""

from __future__ import annotations

from time import perf_counter_ns

from flyspec.engine.model import Model, Step
from flyspec.values.admin import MeasuredStep

SIZES = (1, 32, 8, 16, 4, 24, 2, 64, 48)
"""In order of measurement. Sizes that a slow target has no time for are interpolated linearly."""
NEEDED = 3
"""Number of leading sizes that are measured however long it takes."""
CONTEXT = 64
"""Tokens of context before each step."""
REPEATS, ENOUGH = 6, 2
"""Maximum and minimum measurements per size; the first step of a size may be slow."""
MOST_NS = 400_000_000
"""Nanoseconds after which only needed measurements are made."""


def measure_steps(model: Model) -> tuple[MeasuredStep, ...]:
    """Return the forward time of one sequence's round by size; never less for more tokens.

    Each is the shortest of several: other services start on the same machine, and only ratios
    matter.
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
