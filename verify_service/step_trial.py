"""Times the target's steps by their number of tokens, at start, before requests come."""

from __future__ import annotations

from time import perf_counter_ns

from flyspec.engine.model import Model, Step
from flyspec.values.admin import MeasuredStep

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXT = 64
"""Tokens that each step builds on."""
REPEATS = 5
MOST_NS = 400_000_000
"""What is not measured by then is not."""


def measure_steps(model: Model) -> tuple[MeasuredStep, ...]:
    """What a round of one sequence takes, forward alone; never less for more tokens.

    The shortest of some: other services start on the same machine, and ratios are what counts.
    """
    cache, info = model.cache, model.info
    context = min(CONTEXT, info.context_length - SIZES[-1])
    if context < 1:
        return ()
    ids = [(7 * i * i + 3 * i + 1) % min(info.vocab_size, 251) for i in range(SIZES[-1] + context)]
    until = perf_counter_ns() + MOST_NS
    found: list[MeasuredStep] = []
    slot = cache.acquire().slot
    try:
        model.forward([Step(slot, 0, ids[:context], 0)])
        for size in SIZES:
            step, times = Step(slot, context, ids[context : context + size], size), []
            model.forward([step])
            for _ in range(REPEATS):
                began = perf_counter_ns()
                model.forward([step])
                model.synchronize()
                times.append(perf_counter_ns() - began)
                if perf_counter_ns() > until:
                    break
            least = found[-1].duration_ns if found else 0
            found.append(MeasuredStep(size, max(least, min(times))))
            if perf_counter_ns() > until:
                break
        return tuple(found)
    finally:
        cache.release(slot)
        cache.forget()
