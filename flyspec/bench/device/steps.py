"""Times steps and proposals of a model on a device, in every mode, against reading memory once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from flyspec.bench.device.calls import count_calls
from flyspec.bench.device.models import BenchModel, Mode, noted
from flyspec.bench.device.report import DraftTime, StepTime, bound_ms
from flyspec.bench.device.timing import measure_times
from flyspec.engine.model import Draw, Step
from flyspec.progress import progress
from flyspec.values.tokens import SamplingParams


def step_times(
    model: BenchModel,
    batches: Sequence[int],
    tokens: Sequence[int],
    contexts: Sequence[int],
    modes: Sequence[Mode],
    bandwidth: float,
    repeats: int,
    failures: dict[str, str],
) -> list[StepTime]:
    """Time every kind of step in each mode. `failures` gets the modes that cannot be."""
    cells = list(product(contexts, batches, tokens))
    found = []
    with progress("steps", len(cells) * len(modes)) as advance:
        for mode in model.turn_on(modes, failures):
            for context, batch, count in cells:
                name = f"{mode}, {batch} x {count} after {context}"
                with noted(failures, name):
                    model.keep(batch, context)
                    steps = model.steps(batch, context, count)
                    times = measure_times(
                        partial(model.runner.forward, steps), model.device, repeats
                    )
                    cached = model.read_bytes(batch, context)
                    bound = bound_ms(model.weights + cached, bandwidth)
                    found.append(StepTime(
                        mode, batch, count, context, *times,
                        model.weights, cached, bound, times.step_ms / bound,
                    ))  # fmt: skip
                advance()
    return found


def draft_times(
    model: BenchModel,
    batches: Sequence[int],
    k: int,
    contexts: Sequence[int],
    modes: Sequence[Mode],
    bandwidth: float,
    repeats: int,
    failures: dict[str, str],
) -> list[DraftTime]:
    """Time proposals of K greedy tokens per sequence: K steps that read weights and cache."""
    cells = list(product(contexts, batches))
    found = []
    on_cuda = model.device.type == "cuda"
    with progress("proposals", len(cells) * len(modes)) as advance:
        for mode in model.turn_on(modes, failures):
            for context, batch in cells:
                with noted(failures, f"{mode}, {batch} proposals of {k} after {context}"):
                    model.keep(batch, context)
                    draws = [
                        Draw(Step(slot, context, ids[context : context + 1]), SamplingParams(),
                             max_tokens=k)
                        for slot, ids in enumerate(model.token_ids[:batch])
                    ]  # fmt: skip
                    work = partial(model.runner.draw, draws)
                    times = measure_times(work, model.device, repeats)
                    cached = model.read_bytes(batch, context)
                    bound = k * bound_ms(model.weights + cached, bandwidth)
                    found.append(DraftTime(
                        mode, batch, k, context, *times,
                        model.weights, cached, bound, times.step_ms / bound,
                        token_ms=times.answer_ms / k,
                        waits=count_calls(work).waits if on_cuda else None,
                    ))  # fmt: skip
                advance()
    return found
