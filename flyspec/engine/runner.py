"""Runs a model over slots: the only place that calls a transformers model's forward.

`forward` packs the tokens of many sequences' steps into one ragged, single-row batch: matrix
products see all tokens at once, attention sees each sequence alone (`attention`, `slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from flyspec.config import ModelServerSettings
from flyspec.engine import batch_invariance, stepwise
from flyspec.engine.attention import hook
from flyspec.engine.attention.base import AttentionBackend, Segment
from flyspec.engine.attention.slot import SlotAttention
from flyspec.engine.cache_size import plan_cache
from flyspec.engine.device_memory import peak_bytes
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import NEVER, Draw, Interrupt, Rows, Step
from flyspec.engine.numerics import torch_numerics
from flyspec.engine.out_of_memory import is_out_of_memory, naming_memory
from flyspec.engine.slot_cache import SlotCache
from flyspec.engine.supported import check_config
from flyspec.engine.trial import check_model
from flyspec.errors import ConfigError
from flyspec.values.tokens import Drafted


class ModelRunner:
    """A model with a slot cache. Not thread-safe: one thread owns it.

    `padded`: short pieces of several sequences attend in one call, which pays off where launching
    kernels costs more than arithmetic; the default depends on the device.

    `batch_invariant`: a token's logits have the same bits whatever else is in a step
    (`flyspec.engine.batch_invariance`). None turns it on where it costs little; after `warm_up`,
    the attribute says whether it is on. Raises `ConfigError` where it is unavailable.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int,
        padded: bool | None = None,
        batch_invariant: bool | None = False,
    ) -> None:
        self.info = loaded.info
        self.model = loaded.model
        self._device = loaded.model.device
        config = loaded.model.config.get_text_config()
        check_config(loaded.info.name, config, loaded.info.context_length)
        self.cache = SlotCache(config.num_hidden_layers, num_slots, self.info.context_length)
        hook.register()
        self.model.set_attn_implementation(hook.NAME)
        self._padded = self._device.type == "cuda" if padded is None else padded
        self.batch_invariant = batch_invariance.apply(loaded.info.name, self.model, batch_invariant)
        self._must_be_invariant = bool(batch_invariant)
        self._attention = self._backend()

    @classmethod
    def planned(
        cls,
        loaded: LoadedModel,
        settings: ModelServerSettings,
        tensor_parallel_size: int = 1,
        batch_invariant: bool | None = False,
        agree: Callable[[int], int] = lambda own: own,
    ) -> Self:
        """Create a service's runner, with slots for its sessions or as many as fit.

        `agree` is as in `plan_cache`. Raises `ConfigError`.
        """
        measure = partial(cls.step_bytes, loaded, settings)
        with naming_memory(loaded.info.name, "planning the KV cache"):
            plan = plan_cache(loaded, settings, tensor_parallel_size, measure, agree)
            return cls(loaded, plan.num_slots, batch_invariant=batch_invariant)

    @classmethod
    def step_bytes(cls, loaded: LoadedModel, settings: ModelServerSettings) -> int:
        """GPU memory that steps take temporarily, in bytes: the largest step, with logits for all
        rows, plus a piece of a prompt at the end of the longest context."""
        runner, info, device = cls(loaded, 1), loaded.info, loaded.model.device
        length = info.context_length
        tokens = min(settings.max_num_batched_tokens, length)
        piece = min(settings.prefill_chunk, length)
        ids = [i % info.vocab_size for i in range(tokens)]
        steps = Step(0, 0, ids, tokens), Step(0, length - piece, ids[:piece])
        try:
            runner.forward([Step(0, 0, ids[:1])])  # allocates the slot
            return sum(peak_bytes(device, partial(runner.forward, [step])) for step in steps)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return 0  # the trial reports what is wrong with the model

    def _backend(self) -> AttentionBackend:
        if self.batch_invariant:
            return batch_invariance.FixedShapeAttention(self.cache)
        return SlotAttention(self.cache, self._padded)

    @property
    def bytes_per_token(self) -> int:
        return self.cache.bytes_per_slot // self.cache.max_length

    def warm_up(self) -> None:
        """Check that this model is served correctly, and run what the first request would pay for.

        Raises `ConfigError`. Every rank of a tensor-parallel group must call it.
        """
        check_model(self, self.model, self._attention.windows)
        if self.batch_invariant and not batch_invariance.holds(self):
            if self._must_be_invariant:
                raise ConfigError(
                    f"--batch-invariant: the results of some layers of {self.info.name} still "
                    "depend on the batch; use --no-batch-invariant"
                )
            batch_invariance.remove(self.model)
            self.batch_invariant = False
            self._attention = self._backend()
        self.cache.forget()
        numerics = torch_numerics(self.model, self.batch_invariant)
        self.info = replace(self.info, numerics=numerics)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        return stepwise.draw(self.forward, draws, interrupt)

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Like `Model.forward`; rows are on the model's device.

        Raises `ValueError` for a layer that does not exist.
        """
        layers = {layer for step in steps for layer in step.hidden_layers}
        for layer in layers:
            if not 0 <= layer <= len(self.cache.slot_layers):
                raise ValueError(
                    f"hidden_layers: {layer} is not between 0 and {len(self.cache.slot_layers)}"
                )
        cache, segments = self.cache, []
        token_ids: list[int] = []
        wanted: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        for slot, start, tokens, num_logits, _ in steps:
            row, count = len(token_ids), len(tokens)
            segments.append(Segment(slot, start, count, row))
            token_ids += tokens
            positions += range(start, start + count)
            index += range(slot * cache.max_length + start, slot * cache.max_length + start + count)
            wanted += range(row + count - num_logits, row + count)
            cache.reserve(slot, start, count)
        total = len(token_ids)
        # One transfer to the device for all; a model always computes some logits.
        packed = torch.tensor([*token_ids, *positions, *index, *(wanted or [0])])
        packed = packed.to(self._device, non_blocking=True)
        ids, places, index_, rows = packed.split([total, total, total, len(wanted) or 1])
        layout = self._attention.prepare(segments)
        cache.begin(index_)
        output = self.model(
            input_ids=ids[None],
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=rows,
            layout=layout,
            output_hidden_states=bool(layers),
        )
        found: list[Rows] = []
        at = 0
        for step in steps:
            cache.record(step.slot, step.start, step.token_ids)
            end = at + step.num_logits
            hidden = (output.hidden_states[i][0, rows[at:end]] for i in step.hidden_layers)
            found.append(Rows(output.logits[0, at:end], tuple(hidden)))
            at = end
        return found
