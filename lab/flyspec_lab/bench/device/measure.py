"""Measurements of `flyspec bench device`: steps and proposals in every mode.

Times are by the clock, which waits for the device.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

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
from flyspec.tables import Column, record_table
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.device.calls import count_calls
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.options import DEVICE_MODES, DeviceOptions
from flyspec_lab.bench.shapes import random_model, shape_named
from flyspec_lab.report import Part, Report

Work = Callable[[], object]

BLOCK_SIZE = 32
IN_A_ROW = 4
"""Runs timed together: the host prepares the next while the device works, as in a service."""
WARM_UP = 3
_COPIED = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Bytes of the copy, by kind of device: far more than its caches."""
_STEPS = 0.75
"""Share of the allowed time by which steps end; the rest is for proposals."""
COLUMNS: tuple[Column, ...] = (
    ("mode", "{.mode}"),
    ("batch", "{.batch}"),
    ("tokens", "{.tokens}"),
    ("context", "{.context:,}"),
    ("ms", "{.step_ms:.3f}"),
    ("slowest", "{.slowest_ms:.3f}"),
    ("until answered", "{.answer_ms:.3f}"),
    ("bound", "{.bound_ms:.3f}"),
    ("x bound", "{.ratio:.2f}"),
    ("waits", "{.waits:d}"),
)
NOTES = (
    "ms: median of runs that follow each other; until answered: of one that the host waits for; "
    "bound: reading the weights, and the cache of all sequences, once for each step at the copy's "
    "bandwidth; waits: times that the host waits for the device\n"
    "eager: steps in their own shape; captured: of fixed shapes, as graphs on CUDA; compiled: "
    "captured, with compiled layers"
)


@dataclass(frozen=True)
class DeviceTime:
    """Times in ms of a step, or of a proposal, of `tokens` for each of `batch` sequences.

    They have `context` cached tokens each. `step_ms` is the median of runs that follow each other,
    `slowest_ms` the longest of them; `answer_ms` the median of one run until the host, which waits
    for it, goes on. `bound_ms` is what reading `read_bytes` takes at least, and `ratio` is
    `step_ms` over it. `waits` is None without CUDA.
    """

    mode: str
    batch: int
    tokens: int
    context: int
    step_ms: float
    slowest_ms: float
    answer_ms: float
    read_bytes: int
    bound_ms: float
    ratio: float
    waits: int | None


@contextmanager
def noted(failures: dict[str, str], what: str) -> Iterator[None]:
    """Note why something failed instead of losing all that can be measured besides."""
    try:
        yield
    except Exception as error:
        failures[what] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def each_ms(work: Work, device: torch.device, runs: int = 1) -> float:
    """Return the milliseconds of each of several runs, one after the other."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else int
    synchronize()
    began = time.perf_counter_ns()
    for _ in range(runs):
        work()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6 / runs


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Return the bytes read and written per second by a copy of `num_bytes` on a device.

    It bounds whatever reads memory once; the best of the repeats counts.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    best = min(each_ms(copy, device, IN_A_ROW) for _ in range(repeats))
    return 2 * num_bytes / (best / 1e3)


class BenchModel:
    """A model over blocks, with as many sequences in its cache as the largest batch."""

    def __init__(self, loaded: LoadedModel, batch: int) -> None:
        self.loaded, self.device = loaded, loaded.model.device
        # Fixed shapes have no other attention on a CPU.
        attention: AttentionBackendName = "sdpa" if self.device.type == "cpu" else "auto"
        # One more than the batch, for the trial of captured steps.
        self.runner = ModelRunner(loaded, batch + 1, paging=Paging(BLOCK_SIZE, attention=attention))
        self.weights = weight_bytes(loaded.model)[0]
        rng = random.Random(0)
        vocab_size, length = loaded.info.vocab_size, loaded.info.context_length
        self.token_ids = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]
        self._fill(batch)

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

    def turn_on(self, modes: Sequence[str], failures: dict[str, str]) -> Iterator[str]:
        """Yield each mode once the runner is in it; what cannot be turned on goes to `failures`."""
        for mode in (mode for mode in DEVICE_MODES if mode in modes):
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

    def sequences(self, batch: int, context: int) -> list[tuple[int, list[int]]]:
        """Make the first `batch` sequences hold `context` tokens; return slots and token ids."""
        cache, found = self.runner.cache, list(enumerate(self.token_ids[:batch]))
        for slot, token_ids in found:
            cache.reserve(slot, 0, context)
            cache.record(slot, 0, token_ids[:context])
        return found

    def step(self, batch: int, tokens: int, context: int) -> Work:
        steps = [
            Step(slot, context, ids[context : context + tokens], tokens)
            for slot, ids in self.sequences(batch, context)
        ]
        return partial(self.runner.forward, steps)

    def proposal(self, batch: int, tokens: int, context: int) -> Work:
        """Return greedy tokens, drawn one after the other: steps that read weights and cache."""
        draws = [
            Draw(
                Step(slot, context, ids[context : context + 1]), SamplingParams(), max_tokens=tokens
            )
            for slot, ids in self.sequences(batch, context)
        ]
        return partial(self.runner.draw, draws)


class Measuring:
    """Everything that is measured with these options.

    `failures` gets what could not be, and why; `bandwidth` is in bytes per second.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.options, self.failures = options, dict[str, str]()
        self._began = time.monotonic()
        self.device = resolve_device(options.device)
        self.copied = _COPIED.get(self.device.type, _COPIED["cpu"])
        self.bandwidth = copy_bandwidth(self.device, self.copied)
        # Tokens that a step or a proposal adds to the context.
        self._growth = max(*options.tokens, options.num_speculative_tokens + 1)

    @property
    def spent(self) -> float:
        """The share of the allowed time that has passed."""
        seconds = self.options.max_seconds
        return (time.monotonic() - self._began) / seconds if seconds else 0.0

    def model(self, flag: str, shape: str, model: str) -> BenchModel:
        """Build or load a model for the longest context, or less if it is limited.

        Raises `ConfigError`.
        """
        o, length = self.options, max(self.options.contexts) + self._growth
        if shape:
            dtype = torch.bfloat16 if o.dtype == "auto" else getattr(torch, o.dtype)
            sizes = replace(shape_named(flag, shape), context_length=length)
            config = sizes.config(eos_token_id=None, bos_token_id=None)
            loaded = random_model(shape, config, self.device, dtype)
        else:
            length = min(length, own_context_length(read_config(model)[1]))
            loaded = load_model(model, o.device, o.dtype, length, identify=False)
        return BenchModel(loaded, max(o.batches))

    def steps(self, model: BenchModel) -> Iterator[DeviceTime]:
        """Time every kind of step in each mode."""
        return self._times(model, "steps", self.options.tokens, model.step, 1, _STEPS)

    def proposals(self, model: BenchModel) -> Iterator[DeviceTime]:
        """Time proposals of K tokens per sequence in each mode."""
        k = self.options.num_speculative_tokens
        return self._times(model, "proposals", [k], model.proposal, k, 1.0)

    def _times(
        self,
        model: BenchModel,
        what: str,
        tokens: Sequence[int],
        make: Callable[[int, int, int], Work],
        reads: int,
        until: float,
    ) -> Iterator[DeviceTime]:
        """Time work that reads memory so often in each mode, up to this share of the allowed time.

        Modes have equal parts of it: the last one, which compiles, is not left without. Contexts
        that the model cannot hold are cut to what it can.
        """
        o, began = self.options, self.spent
        longest = model.loaded.info.context_length - self._growth
        contexts = sorted({min(context, longest) for context in o.contexts})
        cells = [(b, t, c) for c, b, t in product(contexts, o.batches, tokens)]
        with progress(what, len(cells) * len(o.modes)) as advance:
            for number, mode in enumerate(model.turn_on(o.modes, self.failures), 1):
                end = began + (until - began) * number / len(o.modes)
                for cell in cells:
                    name = f"{what}, {mode}, {cell}"
                    if self.spent > end:
                        self.failures[f"{name} and what follows"] = "out of time"
                        break
                    with noted(self.failures, name):
                        yield self._time(model, mode, cell, make(*cell), reads)
                    advance()

    def _time(
        self, model: BenchModel, mode: str, cell: tuple[int, int, int], work: Work, reads: int
    ) -> DeviceTime:
        """Time work, and compare it with reading memory so often."""
        batch, _, context = cell
        for _ in range(WARM_UP):
            work()
        repeats = range(self.options.repeats)
        rows = [each_ms(work, model.device, IN_A_ROW) for _ in repeats]
        answers = [each_ms(work, model.device) for _ in repeats]
        read = reads * (model.weights + batch * context * model.runner.bytes_per_token)
        step_ms, bound_ms = statistics.median(rows), 1e3 * read / self.bandwidth
        return DeviceTime(
            mode, *cell, step_ms, max(rows), statistics.median(answers), read, bound_ms,
            step_ms / bound_ms, count_calls(work).waits if model.device.type == "cuda" else None,
        )  # fmt: skip


def measure(o: DeviceOptions) -> Report:
    """Measure the copy bandwidth, the target's steps, and the draft model's proposals.

    What fails is noted, and the rest is measured. Raises `ConfigError` for models that do not load,
    and `StoppedEarly` with what was measured until Ctrl-C was pressed.
    """
    if o.threads:
        torch.set_num_threads(o.threads)
    disable_progress_bar()
    measuring = Measuring(o)
    model = measuring.model("--shape", o.shape, o.model)
    target, draft = model.loaded.info, ""
    steps: list[DeviceTime] = []
    drafts: list[DeviceTime] = []
    with UntilCtrlC() as until:
        for step in measuring.steps(model):
            steps.append(step)
            until.reached = True
        if o.draft_shape or o.draft_model:
            del model
            gc.collect()
            if measuring.device.type == "cuda":
                torch.cuda.empty_cache()
            model = measuring.model("--draft-shape", o.draft_shape, o.draft_model)
            draft = model.loaded.info.name
            drafts += measuring.proposals(model)
    machine = this_machine()
    parts: list[Part] = [
        f"{machine['accelerator'] or machine['processor']}: a copy of "
        f"{measuring.copied / 1e9:.2g} GB moves {measuring.bandwidth / 1e9:,.0f} GB/s; "
        f"{target.name} in {target.dtype}, {target.num_parameters / 1e6:,.0f} M parameters; "
        f"medians of {o.repeats} runs"
    ]
    for title, times in ((f"steps of {target.name}", steps), (f"proposals of {draft}", drafts)):
        # With the modes of a kind of step next to each other.
        rows = sorted(times, key=lambda t: (t.context, t.batch, t.tokens))
        parts += [record_table(COLUMNS, rows, title, keys=4)] if rows else []
    failures = measuring.failures
    parts += [NOTES, *(f"not measured: {what}: {why}" for what, why in failures.items())]
    return until.result(Report({
        "options": vars(o), "device": str(measuring.device), "dtype": target.dtype,
        "target": target.name, "draft": draft, "target_parameters": target.num_parameters,
        "bandwidth": measuring.bandwidth, "machine": machine, "failures": failures,
        "steps": steps, "drafts": drafts,
    }, parts))  # fmt: skip
