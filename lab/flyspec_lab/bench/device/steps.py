"""Times steps and proposals of a model on a device, in every mode, against reading memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

from flyspec.engine.model import Draw, Step
from flyspec.progress import progress
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.device.calls import calls_on
from flyspec_lab.bench.device.models import BenchModel, Mode, noted
from flyspec_lab.bench.device.report import DraftTime, StepTime, bound_ms
from flyspec_lab.bench.device.timing import Allowance, measure_times

Cell = TypeVar("Cell")
Cost = TypeVar("Cost")


class Measuring(NamedTuple):
    """How to measure. `failures` gets what could not be, and why; `bandwidth` is in bytes/s."""

    modes: Sequence[Mode]
    bandwidth: float
    repeats: int
    allowance: Allowance
    failures: dict[str, str]

    def each(
        self,
        model: BenchModel,
        what: str,
        cells: Sequence[Cell],
        measure: Callable[[Mode, Cell], Cost],
        until: float,
    ) -> Iterator[Cost]:
        """Measure all cells in each mode, up to this share of the allowed time.

        Modes have equal parts of it: the last one, which compiles, is not left without.
        """
        begin = self.allowance.spent
        with progress(what, len(cells) * len(self.modes)) as advance:
            for number, mode in enumerate(model.turn_on(self.modes, self.failures), 1):
                end = begin + (until - begin) * number / len(self.modes)
                for cell in cells:
                    name = f"{what}, {mode}, {cell}"
                    if self.allowance.spent > end:
                        self.failures[f"{name} and what follows"] = "out of time"
                        break
                    with noted(self.failures, name):
                        yield measure(mode, cell)
                    advance()


def step_times(
    model: BenchModel,
    batches: Sequence[int],
    tokens: Sequence[int],
    contexts: Sequence[int],
    how: Measuring,
    until: float,
) -> Iterator[StepTime]:
    """Time every kind of step in each mode."""

    def measure(mode: Mode, cell: tuple[int, int, int]) -> StepTime:
        context, batch, count = cell
        model.keep(batch, context)
        steps = model.steps(batch, context, count)
        times = measure_times(partial(model.runner.forward, steps), model.device, how.repeats)
        cached = model.read_bytes(batch, context)
        bound = bound_ms(model.weights + cached, how.bandwidth)
        ratio = times.step_ms / bound
        return StepTime(mode, batch, count, context, *times, model.weights, cached, bound, ratio)

    return how.each(model, "steps", [*product(contexts, batches, tokens)], measure, until)


def draft_times(
    model: BenchModel,
    batches: Sequence[int],
    k: int,
    contexts: Sequence[int],
    how: Measuring,
    until: float,
) -> Iterator[DraftTime]:
    """Time proposals of K greedy tokens per sequence: K steps that read weights and cache."""

    def measure(mode: Mode, cell: tuple[int, int]) -> DraftTime:
        context, batch = cell
        model.keep(batch, context)
        draws = [
            Draw(Step(slot, context, ids[context : context + 1]), SamplingParams(), max_tokens=k)
            for slot, ids in enumerate(model.token_ids[:batch])
        ]
        work = partial(model.runner.draw, draws)
        times = measure_times(work, model.device, how.repeats)
        cached = model.read_bytes(batch, context)
        calls = calls_on(model.device, work)
        bound = k * bound_ms(model.weights + cached, how.bandwidth)
        return DraftTime(
            mode, batch, k, context, *times,
            model.weights, cached, bound, times.step_ms / bound,
            token_ms=times.answer_ms / k,
            waits=calls and calls.waits,
        )  # fmt: skip

    return how.each(model, "proposals", [*product(contexts, batches)], measure, until)
