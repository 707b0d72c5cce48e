"""Measurements of `flyspec bench device`: steps and proposals in every mode, and judging."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from flyspec.concurrency import UntilCtrlC
from flyspec.engine.captured.graphs import CudaCapture, eagerly
from flyspec.engine.configuration import own_context_length, read_config
from flyspec.engine.loading import LoadedModel, load_model, resolve_device
from flyspec.engine.model import Draw, Step
from flyspec.engine.parallel import weight_bytes
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.flags import AttentionBackendName
from flyspec.progress import progress
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.device.calls import calls_on
from flyspec_lab.bench.device.judging import judging_times
from flyspec_lab.bench.device.report import (
    BoundedCost,
    DeviceReport,
    DraftTime,
    JudgingTime,
    StepTime,
)
from flyspec_lab.bench.device.timing import Allowance, DeviceTimes, copy_bandwidth, measure_times
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.options import DeviceOptions
from flyspec_lab.bench.shapes import random_model, shape_named

Mode = Literal["eager", "captured", "compiled"]
MODES: tuple[Mode, ...] = ("eager", "captured", "compiled")
"""Steps in their own shape; of fixed shapes, as graphs on CUDA; the same with compiled layers. In
this order: a model whose layers are compiled stays so."""
Cell = TypeVar("Cell")
Cost = TypeVar("Cost")
BoundedCostT = TypeVar("BoundedCostT", bound=BoundedCost)

_COPIED = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Bytes of the copy, by kind of device: far more than its caches."""
_STEPS, _DRAFTS = 0.65, 0.85
"""Shares of the allowed time by which these end; the rest is for judging."""


@contextmanager
def noted(failures: dict[str, str], what: str) -> Iterator[None]:
    """Note why something failed instead of losing all that can be measured besides."""
    try:
        yield
    except Exception as error:
        failures[what] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class BenchModel:
    """A model over blocks, with as many sequences in its cache as the largest batch."""

    def __init__(
        self, loaded: LoadedModel, batch: int, block_size: int, attention: AttentionBackendName
    ) -> None:
        self.loaded, self.device = loaded, loaded.model.device
        if attention == "auto" and self.device.type == "cpu":
            attention = "sdpa"  # fixed shapes have no other way on a CPU
        # One more than the batch, for the trial of captured steps.
        paging = Paging(block_size, attention=attention)
        self.runner = ModelRunner(loaded, batch + 1, paging=paging)
        self.weights = weight_bytes(loaded.model)[0]
        rng = random.Random(0)
        vocab_size, length = loaded.info.vocab_size, loaded.info.context_length
        self.token_ids = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]
        self.attention: str = self.runner._steps.attention.name  # type: ignore[union-attr]
        self._fill(batch)

    def turn_on(self, modes: Sequence[str], failures: dict[str, str]) -> Iterator[Mode]:
        """Yield each mode once the runner is in it; what cannot be turned on goes to `failures`."""
        for mode in (mode for mode in MODES if mode in modes):
            if mode == "eager":
                yield mode
                continue
            capture = CudaCapture() if self.device.type == "cuda" else eagerly
            with noted(failures, mode):
                self.runner.accelerate(capture, compiled=mode == "compiled")
                yield mode
                if not self.runner._steps._graphs.fixed:  # type: ignore[union-attr]
                    raise RuntimeError(
                        "a step could not be captured, and those after it ran eagerly"
                    )

    def keep(self, batch: int, context: int) -> None:
        """Say that the first `batch` sequences hold `context` tokens."""
        cache = self.runner.cache
        for slot in range(batch):
            cache.reserve(slot, 0, context)
            cache.record(slot, 0, self.token_ids[slot][:context])

    def read_bytes(self, batch: int, context: int) -> int:
        """Bytes of the cache that a step of `batch` sequences reads at least."""
        return batch * context * self.runner.bytes_per_token

    def _fill(self, batch: int) -> None:
        """Fill the memory with noise: each sequence reads blocks of its own, as in a service."""
        cache = self.runner.cache
        cache.reuse = False
        for _ in range(batch):
            slot = cache.acquire().slot
            self.runner.forward([Step(slot, 0, self.token_ids[slot][:1])])
        with torch.inference_mode():
            for layer in cache.kv_layers:
                for states in layer.rows:
                    states.normal_()


class Measuring:
    """Everything that is measured with these options.

    `failures` gets what could not be, and why; `bandwidth` is in bytes per second.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.options, self.failures = options, dict[str, str]()
        self.allowance = Allowance(options.max_seconds)
        self.device = resolve_device(options.device)
        self.copied = _COPIED.get(self.device.type, _COPIED["cpu"])
        self.bandwidth = copy_bandwidth(self.device, self.copied)

    @property
    def growth(self) -> int:
        """Tokens that a step or a proposal adds to the context."""
        return max(*self.options.tokens, self.options.num_speculative_tokens + 1)

    def model(self, flag: str, shape: str, model: str) -> BenchModel:
        """Build or load a model for the longest context, or less if it is limited.

        Raises `ConfigError`.
        """
        o, length = self.options, max(self.options.contexts) + self.growth
        if shape:
            dtype = torch.bfloat16 if o.dtype == "auto" else getattr(torch, o.dtype)
            sizes = replace(shape_named(flag, shape), context_length=length)
            config = sizes.config(eos_token_id=None, bos_token_id=None)
            loaded = random_model(shape, config, self.device, dtype)
        else:
            length = min(length, own_context_length(read_config(model)[1]))
            loaded = load_model(model, o.device, o.dtype, length, identify=False)
        return BenchModel(loaded, max(o.batches), o.block_size, o.attention_backend)

    def contexts(self, model: BenchModel) -> list[int]:
        """Return the contexts, those that the model cannot hold cut to what it can."""
        longest = model.loaded.info.context_length - self.growth
        return sorted({min(context, longest) for context in self.options.contexts})

    def steps(self, model: BenchModel) -> Iterator[StepTime]:
        """Time every kind of step in each mode."""
        o = self.options

        def measure(mode: Mode, cell: tuple[int, int, int]) -> StepTime:
            context, batch, count = cell
            model.keep(batch, context)
            steps = [
                Step(slot, context, ids[context : context + count], count)
                for slot, ids in enumerate(model.token_ids[:batch])
            ]
            times = measure_times(partial(model.runner.forward, steps), model.device, o.repeats)
            return self._cost(StepTime, model, (mode, batch, count, context), times)

        cells = [*product(self.contexts(model), o.batches, o.tokens)]
        return self._each(model, "steps", cells, measure, _STEPS)

    def proposals(self, model: BenchModel) -> Iterator[DraftTime]:
        """Time proposals of K greedy tokens per sequence: K steps that read weights and cache."""
        o, k = self.options, self.options.num_speculative_tokens

        def measure(mode: Mode, cell: tuple[int, int]) -> DraftTime:
            context, batch = cell
            model.keep(batch, context)
            draws = [
                Draw(
                    Step(slot, context, ids[context : context + 1]), SamplingParams(), max_tokens=k
                )
                for slot, ids in enumerate(model.token_ids[:batch])
            ]
            work = partial(model.runner.draw, draws)
            times = measure_times(work, model.device, o.repeats)
            calls = calls_on(model.device, work)
            return self._cost(
                DraftTime, model, (mode, batch, k, context), times, k,
                token_ms=times.answer_ms / k, waits=calls and calls.waits,
            )  # fmt: skip

        cells = [*product(self.contexts(model), o.batches)]
        return self._each(model, "proposals", cells, measure, _DRAFTS)

    def _cost(
        self,
        kind: type[BoundedCostT],
        model: BenchModel,
        cell: tuple[Mode, int, int, int],
        times: DeviceTimes,
        reads: int = 1,
        **more: Any,
    ) -> BoundedCostT:
        """Compare the times of a mode, batch, tokens and context with reading memory so often."""
        cached = model.read_bytes(cell[1], cell[3])
        bound_ms = 1e3 * reads * (model.weights + cached) / self.bandwidth
        ratio = times.step_ms / bound_ms
        return kind(*cell, *times, model.weights, cached, bound_ms, ratio, **more)

    def _each(
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
        modes, begin = self.options.modes, self.allowance.spent
        with progress(what, len(cells) * len(modes)) as advance:
            for number, mode in enumerate(model.turn_on(modes, self.failures), 1):
                end = begin + (until - begin) * number / len(modes)
                for cell in cells:
                    name = f"{what}, {mode}, {cell}"
                    if self.allowance.spent > end:
                        self.failures[f"{name} and what follows"] = "out of time"
                        break
                    with noted(self.failures, name):
                        yield measure(mode, cell)
                    advance()


def measure(o: DeviceOptions) -> DeviceReport:
    """Measure the copy bandwidth, the target's steps, the draft model's proposals, and judging.

    What fails is noted, and the rest is measured. Raises `ConfigError` for models that do not load,
    and `StoppedEarly` with what was measured until Ctrl-C was pressed.
    """
    if o.threads:
        torch.set_num_threads(o.threads)
    disable_progress_bar()
    measuring = Measuring(o)
    target = measuring.model("--shape", o.shape, o.model)
    info, attention = target.loaded.info, target.attention
    steps: list[StepTime] = []
    drafts: list[DraftTime] = []
    judging: list[JudgingTime] = []
    draft = ""
    with UntilCtrlC() as until:
        for step in measuring.steps(target):
            steps.append(step)
            until.reached = True
        del target
        _free(measuring.device)
        if o.draft_shape or o.draft_model:
            model = measuring.model("--draft-shape", o.draft_shape, o.draft_model)
            draft = model.loaded.info.name
            drafts += measuring.proposals(model)
            del model
            _free(measuring.device)
        with noted(measuring.failures, "judging"), torch.inference_mode():
            judging += judging_times(
                measuring.device, torch.bfloat16, o.vocab_size, o.num_speculative_tokens,
                o.batches, o.repeats,
            )  # fmt: skip
    return until.result(
        DeviceReport(
            device=str(measuring.device),
            dtype=info.dtype,
            target=info.name,
            draft=draft,
            target_parameters=info.num_parameters,
            attention=attention,
            block_size=o.block_size,
            vocab_size=o.vocab_size,
            repeats=o.repeats,
            bandwidth=measuring.bandwidth,
            copied_bytes=measuring.copied,
            machine=this_machine(),
            failures=measuring.failures,
            steps=steps,
            drafts=drafts,
            judging=judging,
        )
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
