"""A transformers model with its KV cache: what `flyspec.engine.model.Model` asks for.

A step runs in its own shape, the tokens of all sequences packed into one ragged row, or in a fixed
one that a GPU can replay (`captured`). These two are the only places that call a transformers
model's forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import transformers
from torch import distributed

from flyspec.config import ModelServerSettings
from flyspec.engine import batch_invariance, compiling, stepwise
from flyspec.engine.attention import hook
from flyspec.engine.attention.base import Segment, SegmentAttention
from flyspec.engine.attention.choice import choose_attention
from flyspec.engine.attention.slot import SlotAttention
from flyspec.engine.cache_size import block_size, blocks_of, plan_cache
from flyspec.engine.cache_table import Moves
from flyspec.engine.captured.graphs import (
    Capture,
    CudaCapture,
    captures_collectives,
    compile_layers,
)
from flyspec.engine.captured.shapes import MAX_TOKENS
from flyspec.engine.captured.steps import CapturedSteps
from flyspec.engine.device_memory import peak_bytes
from flyspec.engine.kv_memory import PagedCache, SlotCache
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import (
    NEVER,
    Draw,
    Interrupt,
    Rows,
    Step,
    check_layers,
    check_trees,
)
from flyspec.engine.out_of_memory import is_out_of_memory, naming_memory
from flyspec.engine.supported import check_config
from flyspec.engine.trial import check_faster, check_model
from flyspec.errors import ConfigError
from flyspec.flags import AttentionBackendName
from flyspec.startup import stage
from flyspec.values.admin import BATCH_INVARIANT
from flyspec.values.tokens import Drafted

log = logging.getLogger(__name__)

_NOTHING = nullcontext()


class PackedSteps:
    """A model's forward over segments. Positions must be reserved (`CacheTable`)."""

    def __init__(
        self, model: Any, cache: SlotCache | PagedCache, attention: SegmentAttention
    ) -> None:
        self._model, self._cache, self.attention = model, cache, attention

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Return each step's rows, on the model's device."""
        cache = self._cache
        segments: list[Segment] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        for step in steps:
            slot, start, tokens, num_logits, *_ = step
            row, count = len(token_ids), len(tokens)
            segments.append(Segment(slot, start, count, row, step.parents))
            token_ids += tokens
            positions += step.positions
            index += cache.rows(slot, start, count).tolist()
            wanted += range(row + count - num_logits, row + count)
        total = len(token_ids)
        # One transfer to the device for all; a model always computes some logits.
        packed = torch.tensor([*token_ids, *positions, *index, *(wanted or [0])])
        packed = packed.to(self._model.device, non_blocking=True)
        ids, places, rows, kept = packed.split([total, total, total, len(wanted) or 1])
        layout = self.attention.prepare(segments)
        cache.begin(rows)
        output = self._model(
            input_ids=ids[None],
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=kept,
            layout=layout,
            output_hidden_states=any(step.hidden_layers for step in steps),
        )
        found: list[Rows] = []
        at = 0
        for step, segment in zip(steps, segments, strict=True):
            end, stop = at + step.num_logits, segment.row + segment.length
            own = slice(stop - step.hidden_count, stop)
            hidden = (output.hidden_states[i][0, own] for i in step.hidden_layers)
            found.append(Rows(output.logits[0, at:end], tuple(hidden)))
            at = end
        return found


def rounded_blocks(num_blocks: int, least: int) -> int:
    """Return somewhat fewer blocks, at least `least`: the same number if a little less memory is
    free at the next start, which then finds what was compiled for it."""
    step = 1 << max(0, num_blocks.bit_length() - 6)
    return max(least, (num_blocks + 1) // step * step - 1)


class Paging(NamedTuple):
    """Blocks instead of slots: their size in tokens and their number (0: enough for all slots).

    `attention` names the backend (`attention.choice`).
    """

    block_size: int
    num_blocks: int = 0
    attention: AttentionBackendName = "auto"


class ModelRunner:
    """A model with a KV cache, in slots or blocks. Not thread-safe: one thread owns it.

    `batch_invariant`: a token's logits have the same bits whatever else is in a step
    (`flyspec.engine.batch_invariance`). None turns it on where it costs little; after `warm_up`,
    the attribute says whether it is on. Raises `ConfigError` where it is unavailable.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        batch_invariant: bool | None = False,
        paging: Paging | None = None,
    ) -> None:
        self.info = loaded.info
        self.model = loaded.model
        self._device = loaded.model.device
        config = loaded.model.config.get_text_config()
        length = self.info.context_length
        check_config(loaded.info.name, config, length)
        hook.register()
        self.model.set_attn_implementation(hook.NAME)
        self.batch_invariant = batch_invariance.apply(loaded.info.name, self.model, batch_invariant)
        self._must_be_invariant = bool(batch_invariant)
        self.cache: SlotCache | PagedCache
        paged = None
        if paging is None:
            self.cache = SlotCache(config.num_hidden_layers, num_slots, length)
        else:
            size = paging.block_size
            num_blocks = paging.num_blocks or num_slots * blocks_of(length, size)
            self.cache = PagedCache(config.num_hidden_layers, num_slots, length, num_blocks, size)
            paged = choose_attention(paging.attention, self.cache, self.model)
        self._capture: Capture | None = None  # to turn on in `warm_up`
        self._compiles = False
        self._steps: PackedSteps | CapturedSteps
        if isinstance(self.cache, PagedCache) and paged:
            self._steps = CapturedSteps(self.model, self.cache, paged)
        else:
            self._steps = PackedSteps(self.model, self.cache, self._by_segment())

    @classmethod
    def planned(
        cls,
        loaded: LoadedModel,
        settings: ModelServerSettings,
        tensor_parallel_size: int = 1,
        batch_invariant: bool | None = False,
        agree: Callable[[int], int] = lambda own: own,
    ) -> Self:
        """Create a service's runner, with slots or blocks for its sessions or as many as fit.

        On a GPU, `warm_up` will capture its steps, unless ranks sum through the host. `agree` is
        as in `plan_cache`. Raises `ConfigError`.
        """
        compiling.settle(settings.enforce_eager)
        measure = partial(cls.step_bytes, loaded, settings)
        with naming_memory(loaded.info.name, "planning the KV cache"):
            plan = plan_cache(loaded, settings, tensor_parallel_size, measure, agree)
            paging = None
            if plan.block_size:
                least = blocks_of(plan.max_length, plan.block_size)
                blocks = rounded_blocks(plan.num_blocks, least)
                paging = Paging(plan.block_size, blocks, settings.attention_backend)
            runner = cls(loaded, plan.num_slots, batch_invariant=batch_invariant, paging=paging)
        if runner._device.type == "cuda" and not settings.enforce_eager and captures_collectives():
            runner._capture = CudaCapture()
            # A group's layers have not been tried.
            runner._compiles = tensor_parallel_size == 1 and not compiling.refusal()
        return runner

    @classmethod
    def step_bytes(cls, loaded: LoadedModel, settings: ModelServerSettings) -> int:
        """GPU memory that steps take besides the cache, in bytes: temporarily the largest one, with
        logits for all rows, and a piece of a prompt at the end of the longest context; for good,
        what captured steps share, about that of the largest of them."""
        info, device = loaded.info, loaded.model.device
        length, size = info.context_length, block_size(settings, device)
        runner = cls(loaded, 1)  # over a slot: attention over blocks would be compiled for it
        tokens = min(settings.max_num_batched_tokens, length)
        piece = min(settings.prefill_chunk, length)
        ids = [i % info.vocab_size for i in range(tokens)]
        steps = [Step(0, 0, ids, tokens), Step(0, length - piece, ids[:piece])]
        if size and not settings.enforce_eager:
            captured = min(MAX_TOKENS, tokens)
            steps.append(Step(0, 0, ids[:captured], captured))
        try:
            runner.forward([Step(0, 0, ids[:1])])  # allocates the slot
            return sum(peak_bytes(device, partial(runner.forward, [step])) for step in steps)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log.warning("could not measure steps: %s", error)
            return 0  # the trial reports what is wrong with the model

    def _by_segment(self) -> SegmentAttention:
        if self.batch_invariant:
            return batch_invariance.FixedShapeAttention(self.cache)
        return SlotAttention(self.cache)

    @property
    def bytes_per_token(self) -> int:
        return self.cache.bytes_per_token

    @property
    def tree_refusal(self) -> str:
        if isinstance(self._steps, CapturedSteps):
            return "steps over blocks run in fixed shapes, which have no trees; use --block-size 0"
        if self.batch_invariant:
            return "no tree has the bits of a chain in the batch-invariant mode; turn that off"
        return ""

    def warm_up(self) -> None:
        """Check that this model is served correctly, and run what the first request would pay for.

        Raises `ConfigError`. Every rank of a tensor-parallel group must call it.
        """
        stage("comparing it with its own attention")
        check_model(self, self.model, self._steps.attention.windows)
        if self.batch_invariant and not batch_invariance.holds(self):
            if self._must_be_invariant:
                raise ConfigError(
                    f"--batch-invariant: the results of some layers of {self.info.name} still "
                    "depend on the batch; use --no-batch-invariant"
                )
            batch_invariance.remove(self.model)
            self.batch_invariant = False
            self._steps = PackedSteps(self.model, self.cache, self._by_segment())
        if self._capture is not None:
            stage("compiling and capturing steps" if self._compiles else "capturing steps")
            self.accelerate(self._capture, self._compiles)
            self._capture_ahead()
        self.cache.forget()
        self.info = replace(self.info, numerics=self._numerics())

    def accelerate(self, capture: Capture, compiled: bool) -> None:
        """Capture steps over blocks from now on, of layers that are `compiled` first.

        Raises `ConfigError` if that changes the logits.
        """
        steps = self._steps
        if not isinstance(steps, CapturedSteps):
            return

        def faster() -> None:
            if compiled:
                compile_layers(self.model, self.cache)
            steps.capture(capture)

        difference = check_faster(self, faster)
        if difference is not None:
            raise ConfigError(
                f"--model {self.info.name}: compiled and captured, its logits would differ by "
                f"{difference:.2g} of the largest logit; use --enforce-eager"
            )

    def _capture_ahead(self) -> None:
        if isinstance(self._steps, CapturedSteps):
            began = time.perf_counter()
            with self._on_device():
                count = self._steps.capture_ahead()
            log.info("captured %d steps in %.1f s", count, time.perf_counter() - began)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make its GPU the current one: a thread's is the first one until it says otherwise."""
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return _NOTHING

    def _numerics(self) -> str:
        """Describe what determines the model's bits besides its weights, to compare.

        Kernels differ by release, processor and number of threads, and the ranks of a
        tensor-parallel group sum their shares. Replicas with equal strings generate the same text
        with `exact`; others diverge at a near-tie sooner or later.
        """
        parameter = next(self.model.parameters())
        if parameter.device.type == "cuda":
            where = torch.cuda.get_device_name(parameter.device)
        else:
            amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
            count = torch.get_num_threads()
            threads = f"{count} thread{'s' * (count > 1)}"
            where = f"{torch.backends.cpu.get_cpu_capability()}{amx}, {threads}"
        parts = [
            str(parameter.dtype).removeprefix("torch."),
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            where,
        ]
        if isinstance(self._steps, CapturedSteps):
            compiled = "compiled, " if self._compiles else ""
            parts.append(f"{compiled}{self._steps.attention.name} attention over blocks")
        if distributed.is_available() and distributed.is_initialized():
            parts.append(f"{distributed.get_world_size()} ranks")
        return ", ".join([*parts, BATCH_INVARIANT] if self.batch_invariant else parts)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Like `Model.forward`; rows are on the model's device.

        Raises `ValueError` for a layer that does not exist.
        """
        check_layers(steps, len(self.cache.kv_layers))
        check_trees(steps, self.tree_refusal)
        for step in steps:
            self.cache.reserve(step.slot, step.start, len(step.token_ids))
        rows = self.run(steps, self.cache.take_moves())
        for step in steps:
            self.cache.record(step.slot, step.start, step.token_ids[: step.num_chained])
        return rows

    @torch.inference_mode()
    def run(self, steps: Sequence[Step], moves: Moves) -> list[Rows]:
        """Run steps whose positions are reserved, after what that moves."""
        with self._on_device():
            self.cache.carry_out(moves)
            return self._steps.forward(steps)

    @torch.inference_mode()
    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """Like `Model.draw`; without the host in between where the device can do it all."""
        steps = self._steps
        if not isinstance(steps, CapturedSteps):
            return stepwise.draw(self.forward, draws, interrupt)
        found = dict.fromkeys(range(len(draws)), Drafted([]))
        on_device = {i: draw for i, draw in enumerate(draws) if draw.is_plain}
        others = {i: draw for i, draw in enumerate(draws) if i not in on_device}
        if on_device:
            own = [*on_device.values()]
            for draw in own:
                count = len(draw.step.token_ids) + draw.max_tokens - 1
                self.cache.reserve(draw.step.slot, draw.step.start, count)
            with self._on_device():
                self.cache.carry_out(self.cache.take_moves())
                drawn = steps.draw(own)
            for draw, drafted in zip(own, drawn, strict=True):
                step = draw.step
                cached = drafted.token_ids[:-1] if draw.max_tokens > 1 else []
                self.cache.record(step.slot, step.start, [*step.token_ids, *cached])
            found |= zip(on_device, drawn, strict=True)
        if others:
            drawn = stepwise.draw(self.forward, [*others.values()], interrupt)
            found |= zip(others, drawn, strict=True)
        return [*found.values()]
