"""How fast the verify engine's forward is: a step's time, prefill, memory, what takes the time.

Measured in this process over `ModelRunner.forward`, as the engine's loop calls it; judging has a
bench of its own. Every kind of step runs in turn, in an order that rotates, before any is repeated:
a machine whose speed drifts slows all of them alike. Under tensor parallelism this is rank 0.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from flyspec.bench.engine.parts import PartTimes, timed_parts
from flyspec.bench.engine.steps_report import (
    Cell,
    EngineMemory,
    EngineOptions,
    EngineReport,
    EngineRun,
    PrefillCost,
    StepCost,
)
from flyspec.config import VerifySettings
from flyspec.engine.loading import own_context_length, read_config
from flyspec.engine.model import Model, Step
from flyspec.engine.parallel import weight_bytes
from flyspec.engine.slots import Copy
from flyspec.errors import ConfigError
from verify_service.ranks import Ranks, find_place, load, set_threads

_FILL_CHUNK = 512


def cells(options: EngineOptions) -> list[Cell]:
    """Every kind of step that is measured."""
    return [
        Cell(batch, k, context)
        for context in options.contexts
        for k in options.num_speculative_tokens
        for batch in options.batches
    ]


def count(options: EngineOptions) -> int:
    """How many times `measure` calls `on_sample`."""
    return (options.repeats + 1) * (2 * len(cells(options)) + len(options.prompt_chunks))


def context_limit(model: str) -> int:
    """The longest sequence that a model's configuration allows. Raises `ConfigError`."""
    _, config = read_config(model)
    return own_context_length(config)


def check(options: EngineOptions) -> None:
    """Refuse contexts that the model does not reach. Raises `ConfigError`."""
    limit = context_limit(options.model)
    if options.slot_tokens > limit:
        raise ConfigError(
            f"--context {max(options.contexts)}: with K = {max(options.num_speculative_tokens)} a "
            f"sequence has {options.slot_tokens} tokens, the model's limit is {limit}"
        )


class Opened(NamedTuple):
    """A runner that is warm, and the bytes of the weights: this rank's, and all ranks'."""

    runner: Model
    own_weights: int
    total_weights: int


@contextmanager
def open_runner(settings: VerifySettings) -> Iterator[Opened]:
    """The runner as the verify service builds it, with its ranks; they end with the context.

    Raises `ConfigError`.
    """
    place = find_place(settings)
    ranks = None if place is None else Ranks(place, settings)
    set_threads(settings, place)
    try:
        loaded, runner = load(settings, ranks.start() if ranks else None)
        runner.warm_up()
        if ranks is not None:
            ranks.lead(runner)
        yield Opened(runner, *weight_bytes(loaded.model))
    finally:
        if ranks is not None:
            ranks.stop()


def measure(options: EngineOptions, on_sample: Callable[[], None] = lambda: None) -> EngineReport:
    """Load the model and time everything. Raises `ConfigError`."""
    check(options)
    settings = VerifySettings(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        max_sessions=max(options.batches),
        max_model_len=options.slot_tokens,
        tensor_parallel_size=options.tensor_parallel_size,
        log_level="warning",
    )
    with open_runner(settings) as opened:
        bench = _Bench(opened.runner, options)
        bench.run(on_sample)
        info, cache = opened.runner.info, opened.runner.cache
        bytes_per_token = opened.runner.bytes_per_token
        bytes_per_slot = bytes_per_token * cache.max_length
        memory = EngineMemory(
            bytes_per_token=bytes_per_token,
            bytes_per_slot=bytes_per_slot,
            slot_tokens=cache.max_length,
            num_slots=cache.num_slots,
            cache_bytes=bytes_per_slot * cache.num_slots,
            weights=opened.own_weights,
            total_weights=opened.total_weights,
        )
        run = EngineRun(
            options.tensor_parallel_size,
            torch.get_num_threads(),
            bench.step_costs(),
            bench.prefill_costs(),
            memory,
        )
        return EngineReport(info.name, info.dtype, info.device, options.repeats, [run])


class _Bench:
    """Takes the samples of one runner; all in seconds."""

    def __init__(self, runner: Model, options: EngineOptions) -> None:
        self._runner, self._options = runner, options
        rng = random.Random(0)
        vocab_size = runner.info.vocab_size
        self._token_ids = [rng.randrange(vocab_size) for _ in range(options.slot_tokens)]
        self._cells = cells(options)
        self._times: dict[Cell, list[float]] = {cell: [] for cell in self._cells}
        self._parts: dict[Cell, list[PartTimes]] = {cell: [] for cell in self._cells}
        self._chunks: dict[int, list[list[float]]] = {c: [] for c in options.prompt_chunks}

    def run(self, on_sample: Callable[[], None]) -> None:
        """Everything, once to warm up and then `repeats` times."""
        self._fill()
        for repeat in range(self._options.repeats + 1):
            kept = repeat > 0
            turn = repeat * len(self._cells) // (self._options.repeats + 1)
            for cell in [*self._cells[turn:], *self._cells[:turn]]:
                steps = self._steps(cell)
                seconds = self._time(steps)
                on_sample()
                with timed_parts(self._runner.synchronize) as parts:
                    parts.total = self._time(steps)
                on_sample()
                if kept:
                    self._times[cell].append(seconds)
                    self._parts[cell].append(parts)
            for chunk, samples in self._chunks.items():
                times = self._prefill(chunk)
                if kept:
                    samples.append(times)
                on_sample()

    def step_costs(self) -> list[StepCost]:
        """What the samples say of every kind of step."""
        costs = []
        for cell in self._cells:
            times, parts = sorted(self._times[cell]), self._parts[cell]
            step = statistics.median(times)
            medians = {
                f"{name}_ms": 1e3 * statistics.median(getattr(p, name) for p in parts)
                for name in ("attention", "cache_write", "matrix_products", "other")
            }
            costs.append(
                StepCost(
                    *cell,
                    step_ms=step * 1e3,
                    step_p90_ms=times[round(0.9 * (len(times) - 1))] * 1e3,
                    tokens_per_second=cell.batch * (cell.num_speculative_tokens + 1) / step,
                    **medians,
                )
            )
        return costs

    def prefill_costs(self) -> list[PrefillCost]:
        """What the samples say of every size of chunk."""
        length = max(self._options.contexts)
        return [
            PrefillCost(
                chunk=chunk,
                prompt_tokens=length,
                tokens_per_second=length / statistics.median(sum(times) for times in samples),
                first_chunk_ms=statistics.median(times[0] for times in samples) * 1e3,
                last_chunk_ms=statistics.median(t[length // chunk - 1] for t in samples) * 1e3,
            )
            for chunk, samples in self._chunks.items()
        ]

    def _fill(self) -> None:
        """One sequence computed, the other slots copies of it: what they hold costs the same."""
        length, cache = max(self._options.contexts), self._runner.cache
        for start in range(0, length, _FILL_CHUNK):
            part = self._token_ids[start : min(start + _FILL_CHUNK, length)]
            self._runner.forward([Step(0, start, part, 0)])
        cache.pending_copies += [Copy(0, slot, length) for slot in range(1, cache.num_slots)]

    def _steps(self, cell: Cell) -> list[Step]:
        """A step's work: slots keep `context` tokens and go on with K + 1."""
        end = cell.context + cell.num_speculative_tokens + 1
        token_ids = self._token_ids[cell.context : end]
        return [Step(slot, cell.context, token_ids, len(token_ids)) for slot in range(cell.batch)]

    def _prefill(self, chunk: int) -> list[float]:
        """Times of the chunks of a whole prompt."""
        length = max(self._options.contexts)
        times = []
        for start in range(0, length, chunk):
            part = self._token_ids[start : min(start + chunk, length)]
            times.append(self._time([Step(0, start, part, int(start + chunk >= length))]))
        return times

    def _time(self, steps: Sequence[Step]) -> float:
        self._runner.synchronize()
        begin = time.perf_counter()
        self._runner.forward(steps)
        self._runner.synchronize()
        return time.perf_counter() - begin
