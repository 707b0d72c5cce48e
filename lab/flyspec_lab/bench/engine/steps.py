"""Speed of the verify engine's forward pass: time per step, prefill, memory, parts of a step.

Measures `ModelRunner.forward` in this process, as the engine's loop calls it; `bench judge`
measures judging. Every kind of step runs once, in a rotating order, before any is repeated, so that
a machine whose speed drifts slows all of them alike. Under tensor parallelism this is rank 0.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from flyspec.concurrency import UntilCtrlC
from flyspec.config import VerifySettings
from flyspec.engine.cache_table import Copy
from flyspec.engine.configuration import own_context_length, read_config
from flyspec.engine.model import Model, Step
from flyspec.engine.parallel import weight_bytes
from flyspec.errors import ConfigError
from flyspec.progress import progress
from flyspec_lab.bench.engine.parts import PARTS, timed_parts
from flyspec_lab.bench.engine.steps_report import (
    Cell,
    EngineMemory,
    EngineReport,
    EngineRun,
    PrefillCost,
    StepCost,
)
from flyspec_lab.bench.options import EngineOptions
from verify_service.ranks import Ranks, find_place, load, set_threads

_FILL_CHUNK = 512


def context_limit(model: str) -> int:
    """Return the maximum sequence length in a model's configuration. Raises `ConfigError`."""
    _, config = read_config(model)
    return own_context_length(config)


def measure(options: EngineOptions) -> EngineReport:
    """Measure every tensor-parallel size. Raises `ConfigError`.

    Raises `StoppedEarly` with the medians until then if Ctrl-C was pressed after a counted run of
    all steps of the only size.
    """
    limit = context_limit(options.model)
    if options.slot_tokens > limit:
        raise ConfigError(
            f"--context {max(options.contexts)}: with K = {max(options.num_speculative_tokens)} a "
            f"sequence has {options.slot_tokens} tokens, the model's limit is {limit}"
        )
    disable_progress_bar()
    sizes = options.tensor_parallel_sizes
    if len(sizes) == 1:
        return _measure(options, sizes[0])
    reports = []
    for size in sizes:  # in separate processes, since a process can join its ranks only once
        with ProcessPoolExecutor(1, get_context("spawn"), disable_progress_bar) as apart:
            reports.append(apart.submit(_measure, options, size).result())
    return replace(reports[0], runs=[run for report in reports for run in report.runs])


def _measure(options: EngineOptions, size: int) -> EngineReport:
    """Measure one size, as rank 0 of a runner as the verify service builds it."""
    settings = VerifySettings(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        max_sessions=max(options.batches),
        max_model_len=options.slot_tokens,
        tensor_parallel_size=size,
        log_level="warning",
    )
    place = find_place(settings)
    ranks = None if place is None else Ranks(place, settings)
    set_threads(settings, place)
    try:
        loaded, runner = load(settings, ranks.start() if ranks else None)
        runner.warm_up()
        if ranks is not None:
            ranks.lead(runner)
        own_weights, total_weights = weight_bytes(loaded.model)
        bench = _Bench(runner, options)
        bench.run("measuring" if size == 1 else f"measuring {size} ranks")
    finally:
        if ranks is not None:
            ranks.stop()
    info, cache, bytes_per_token = runner.info, runner.cache, runner.bytes_per_token
    bytes_per_slot = bytes_per_token * cache.max_length
    memory = EngineMemory(
        bytes_per_token=bytes_per_token,
        bytes_per_slot=bytes_per_slot,
        slot_tokens=cache.max_length,
        num_slots=cache.num_slots,
        cache_bytes=bytes_per_slot * cache.num_slots,
        weights=own_weights,
        total_weights=total_weights,
    )
    run = EngineRun(
        size, torch.get_num_threads(), bench.step_costs(), bench.prefill_costs(), memory
    )
    found = EngineReport(info.name, info.dtype, info.device, bench.repeats, [run])
    return bench.until.result(found)


class _Bench:
    """Samples of one runner, all in seconds."""

    def __init__(self, runner: Model, options: EngineOptions) -> None:
        self._runner, self._options = runner, options
        self.until, self.repeats = UntilCtrlC(), 0
        rng = random.Random(0)
        vocab_size = runner.info.vocab_size
        self._token_ids = [rng.randrange(vocab_size) for _ in range(options.slot_tokens)]
        self._cells = [
            Cell(batch, k, context)
            for context in options.contexts
            for k in options.num_speculative_tokens
            for batch in options.batches
        ]
        self._times: dict[Cell, list[float]] = {cell: [] for cell in self._cells}
        self._parts: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in self._cells}
        self._chunks: dict[int, list[list[float]]] = {c: [] for c in options.prompt_chunks}

    def run(self, what: str) -> None:
        """Measure everything once to warm up, then `repeats` times."""
        self._fill()
        runs = self._options.repeats + 1
        count = runs * (len(self._cells) + len(self._chunks))
        with self.until, progress(what, count) as advance:
            for repeat in range(runs):
                kept = repeat > 0
                turn = repeat * len(self._cells) // runs
                for cell in [*self._cells[turn:], *self._cells[:turn]]:
                    steps = self._steps(cell)
                    seconds = self._time(steps)
                    with timed_parts(self._runner.synchronize) as parts:
                        total = self._time(steps)
                    parts["other"] = max(0.0, total - sum(parts.values()))
                    if kept:
                        self._times[cell].append(seconds)
                        self._parts[cell].append(parts)
                    advance()
                for chunk, samples in self._chunks.items():
                    times = self._prefill(chunk)
                    if kept:
                        samples.append(times)
                    advance()
                self.repeats, self.until.reached = repeat, kept

    def step_costs(self) -> list[StepCost]:
        costs = []
        for cell in self._cells:
            times, parts = sorted(self._times[cell]), self._parts[cell]
            step = statistics.median(times)
            medians: dict[str, Any] = {
                f"{name}_ms": 1e3 * statistics.median(p[name] for p in parts)
                for name in (*PARTS, "other")
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
        """Compute one sequence and copy it to the other slots; their contents do not matter."""
        length, cache = max(self._options.contexts), self._runner.cache
        for start in range(0, length, _FILL_CHUNK):
            part = self._token_ids[start : min(start + _FILL_CHUNK, length)]
            self._runner.forward([Step(0, start, part, 0)])
        cache.pending_copies += [Copy(0, slot, length) for slot in range(1, cache.num_slots)]

    def _steps(self, cell: Cell) -> list[Step]:
        """Return a step's work: each slot keeps `context` tokens and runs K + 1 more."""
        end = cell.context + cell.num_speculative_tokens + 1
        token_ids = self._token_ids[cell.context : end]
        return [Step(slot, cell.context, token_ids, len(token_ids)) for slot in range(cell.batch)]

    def _prefill(self, chunk: int) -> list[float]:
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
