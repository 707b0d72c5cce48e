"""A model served by the native step, with the interface of `ModelRunner`, without transformers."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from flyspec.engine import stepwise
from flyspec.engine.cache_table import RowCopy
from flyspec.engine.distributions import encode
from flyspec.engine.lazy_memory import allocate
from flyspec.engine.loading import LoadedModel
from flyspec.engine.logits import process_logits
from flyspec.engine.model import NEVER, Draw, Interrupt, Rows, Step, check_layers, drafted
from flyspec.engine.native.library import BatchStruct, Library, SamplerStruct
from flyspec.engine.native.weights import PANEL, PackedWeights
from flyspec.engine.sampling import TARGET_STREAM
from flyspec.engine.slots import SlotTable
from flyspec.values.admin import BATCH_INVARIANT
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, TokenDistribution

_MAX_KEPT = 1 << 24
"""Maximum logits that a draw keeps at once, 64 MiB."""


class NativeModel:
    """A Llama-like model in bf16 on a CPU. Not thread-safe: one thread at a time.

    A row's bits depend only on its own sequence. Raises `ValueError` for a module that cannot be
    packed. Nothing of the module is kept, except an embedding that is not shared with the head.
    """

    def __init__(
        self, loaded: LoadedModel, num_slots: int, library: Library, threads: int = 1
    ) -> None:
        # Its bits depend on neither threads nor batch.
        numerics = f"bfloat16, native step for {library.name}, {BATCH_INVARIANT}"
        self.info = replace(loaded.info, numerics=numerics)
        self.library, self.threads = library, threads
        length = self.info.context_length
        self.cache = SlotTable(num_slots, length)
        self._weights = PackedWeights(loaded.model, length)
        shape = self._weights.shape
        self.bytes_per_token = 4 * shape.layers * shape.kv_heads * shape.dim
        places = -(-length // PANEL) * PANEL
        size = (shape.layers, num_slots, shape.kv_heads, 2, places, shape.dim)
        self._memory = allocate(2 * prod(size), large_pages=False)
        flat = torch.frombuffer(self._memory, dtype=torch.bfloat16)
        self._cache = flat.view(size)
        shape.slots, shape.threads, shape.cache = num_slots, threads, flat.data_ptr()
        self._functions = library.functions
        self.tree_refusal = ""
        self._handle = ctypes.c_void_p(self._functions.flyspec_open(ctypes.byref(shape)))
        weakref.finalize(self, self._functions.flyspec_close, self._handle)

    def __str__(self) -> str:
        return f"{self.library.name}, {self.threads} thread{'s' * (self.threads > 1)}"

    def warm_up(self) -> None:
        """Do nothing: the trial has already run (`choice`)."""

    def synchronize(self) -> None: ...

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Like `Model.forward`; rows are float32.

        Raises `ValueError` for a layer that does not exist, `FloatingPointError` for logits that
        are not finite.
        """
        count, width = self._weights.shape.layers, self._weights.shape.hidden
        check_layers(steps, count)
        # The native step numbers them from 0.
        layers = sorted({layer % (count + 1) for step in steps for layer in step.hidden_layers})
        batch, arrays = self._begin(steps)
        logits = torch.empty((batch.num_wanted, self.info.vocab_size))
        hidden = torch.empty((len(layers), batch.num_kept, width))
        numbers = array("i", layers)
        batch.logits, batch.hidden = logits.data_ptr(), hidden.data_ptr()
        batch.num_hidden, batch.hidden_layers = len(layers), _at(numbers)
        batch.stride = batch.num_kept * width
        check_status(self._functions.flyspec_forward(self._handle, ctypes.byref(batch)))
        del arrays
        found: list[Rows] = []
        at = had = 0
        for step in steps:
            self.cache.record(step.slot, step.start, step.token_ids[: step.num_chained])
            rows = slice(at, at := at + step.num_logits)
            kept = slice(had, had := had + step.hidden_count)
            own = (hidden[layers.index(i % (count + 1)), kept] for i in step.hidden_layers)
            found.append(Rows(logits[rows], tuple(own)))
        return found

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """Like `Model.draw`; mostly many steps in one call.

        Draws with bias or penalties, from the distributions that are sent, or with several rows
        and more, are made one step per call.
        """
        several = any(draw.step.num_logits > 1 for draw in draws)
        more = any(draw.max_tokens > 1 or _listed(draw) or _sampled(draw) for draw in draws)
        if not all(draw.is_keyed for draw in draws) or (several and more) or self._is_large(draws):
            return stepwise.draw(self.forward, draws, interrupt)
        if several:
            return self._pick(draws)
        return self._run(draws, interrupt)

    def _pick(self, draws: Sequence[Draw]) -> list[Drafted]:
        """Return the most likely token of each row wanted."""
        steps = [d.step if d.sampling else d.step._replace(num_logits=0) for d in draws]
        batch, kept = self._begin(steps)
        tokens = array("i", bytes(4 * batch.num_wanted))
        chances = array("f", bytes(4 * batch.num_wanted))
        batch.tokens, batch.chances = _at(tokens), _at(chances)
        check_status(self._functions.flyspec_forward(self._handle, ctypes.byref(batch)))
        del kept
        found, at = [], 0
        for draw, step in zip(draws, steps, strict=True):
            self.cache.record(step.slot, step.start, step.token_ids)
            own = slice(at, at := at + step.num_logits)
            found.append(drafted(draw, tokens[own].tolist(), chances[own].tolist()))
        return found

    def _run(self, draws: Sequence[Draw], interrupt: Interrupt) -> list[Drafted]:
        """Draw tokens over steps of a single row each, in one call."""
        steps = [d.step if d.sampling else d.step._replace(num_logits=0) for d in draws]
        drawing = [draw for draw, step in zip(draws, steps, strict=True) if step.num_logits]
        most = [draw.max_tokens for draw in drawing]
        rows = None
        if any(map(_listed, drawing)):
            rows = torch.empty(len(most), max(most), self.info.vocab_size)
        batch, kept = self._begin(steps, most)
        drawn = enumerate(draw_at_once(self.library, self._handle, batch, drawing, interrupt, rows))
        del kept
        found = []
        for draw, (slot, start, fed, num_logits, *_) in zip(draws, steps, strict=True):
            tokens: list[int] = []
            sure: list[float] = []
            sent: list[TokenDistribution] | None = None
            if num_logits:
                index, (tokens, sure) = next(drawn)
                if rows is not None and (spec := _listed(draw)) is not None:
                    sent = encode(_processed(rows[index, : len(tokens)], draw, spec), spec)
            # All but the last token drawn are cached.
            self.cache.record(slot, start, [*fed, *tokens[:-1]])
            result = drafted(draw, tokens, sure)
            found.append(result if sent is None else result._replace(distributions=sent))
        return found

    def _is_large(self, draws: Sequence[Draw]) -> bool:
        """True if the rows that would be kept for distributions are."""
        if not any(map(_listed, draws)):
            return False
        width = max(draw.max_tokens for draw in draws)
        return len(draws) * width * self.info.vocab_size > _MAX_KEPT

    def _begin(
        self, steps: Sequence[Step], most: Sequence[int] = ()
    ) -> tuple[BatchStruct, Sequence[array[int]]]:
        """Carry out pending copies and reserve positions; return the batch and what it points to.

        `most` has the maximum tokens drawn for each step with rows wanted; all but one are cached.
        """
        cache = self._cache
        for copy in self.cache.pending_copies:
            if isinstance(copy, RowCopy):
                self._copy_rows(copy)
                continue
            # Whole blocks of positions, of both keys and values.
            source, target, length = copy
            end = -(-length // PANEL) * PANEL
            cache[:, target, :, :, :end] = cache[:, source, :, :, :end]
        self.cache.pending_copies.clear()
        ids, positions, slots, wanted, kept, places, up = (array("i") for _ in range(7))
        trees = any(step.parents for step in steps)
        further = iter(most)
        for step in steps:
            slot, start, tokens, num_logits, *_ = step
            count = len(tokens)
            more = next(further) - 1 if most and num_logits else 0
            self.cache.reserve(slot, start, count + more)
            ids.extend(tokens)
            positions.extend(step.positions)
            if trees:
                places.extend(range(start, start + count))
                up.extend([0] * step.num_chained)
                up.extend(1 + index - parent for index, parent in enumerate(step.parents))
            slots.extend([slot] * count)
            wanted.extend(range(len(ids) - num_logits, len(ids)))
            if step.hidden_layers:
                kept.extend(range(len(ids) - step.hidden_count, len(ids)))
        if not (min(ids) >= 0 and max(ids) < self.info.vocab_size):
            raise ValueError(f"token ids must be between 0 and {self.info.vocab_size - 1}")
        batch = BatchStruct(
            len(ids), len(wanted), len(kept), ids=_at(ids), positions=_at(positions),
            slots=_at(slots), wanted=_at(wanted), kept=_at(kept),
        )  # fmt: skip
        if trees:
            batch.places, batch.up = _at(places), _at(up)
        return batch, (ids, positions, slots, wanted, kept, places, up)

    def _copy_rows(self, copy: RowCopy) -> None:
        """Copy rows of one slot's memory."""
        length = self.cache.max_length
        slot = copy.targets[0] // length
        sources, targets = (array("i", [row % length for row in rows]) for rows in copy)
        self._functions.flyspec_copy(self._handle, slot, len(sources), _at(sources), _at(targets))


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def draw_at_once(
    library: Library,
    handle: ctypes.c_void_p,
    batch: BatchStruct,
    draws: Sequence[Draw],
    interrupt: Interrupt = NEVER,
    rows: Tensor | None = None,
    offsets: Sequence[int] = (),
) -> list[tuple[list[int], list[float]]]:
    """Draw tokens after each row wanted of a batch, in one call; return them with their chances.

    `rows` [draws, most tokens, vocabulary] receives the logits. `offsets`: how far each draw's
    positions are ahead of those in the batch. Raises `FloatingPointError` for logits that are not
    finite.
    """
    most = array("i", [draw.max_tokens for draw in draws])
    stops = array("i", chain.from_iterable(draw.stop_token_ids for draw in draws))
    ends = array("i", accumulate(len(draw.stop_token_ids) for draw in draws))
    left = array("d", [draw.min_confidence for draw in draws])
    width = max(most, default=0)
    tokens = array("i", bytes(4 * width * len(most)))
    chances = array("f", bytes(4 * width * len(most)))
    counts = array("i", bytes(4 * len(most)))
    ahead = array("i", offsets)
    samplers = None
    if any(map(_sampled, draws)):
        samplers = (SamplerStruct * len(draws))(*map(_sampler, draws))
    check_status(
        library.functions.flyspec_draw(
            handle, ctypes.byref(batch), _at(most), _at(ends), _at(stops), _at(left),
            interrupt.address, width, _at(tokens), _at(chances),
            None if rows is None else rows.data_ptr(), _at(counts), samplers,
            _at(ahead) if ahead else None,
        )
    )  # fmt: skip
    owns = [slice(i * width, i * width + count) for i, count in enumerate(counts)]
    return [(tokens[own].tolist(), chances[own].tolist()) for own in owns]


def check_status(status: int) -> None:
    """Raise `FloatingPointError` for a call of the native step that failed."""
    if status:
        raise FloatingPointError("the logits are not finite")


def _sampled(draw: Draw) -> bool:
    return draw.sampling is not None and not draw.sampling.greedy


def _sampler(draw: Draw) -> SamplerStruct:
    s = draw.sampling
    assert s is not None
    return SamplerStruct(draw.seed, 0, s.temperature, s.top_p, s.min_p, s.top_k, TARGET_STREAM)


def _listed(draw: Draw) -> DistributionSpec | None:
    """Return how a draw's distributions are to be listed, which needs the logits, if so.

    Those that greedy tokens are drawn from are points.
    """
    spec = draw.distribution
    return None if spec is None or spec.draw_from_it else spec


def _processed(rows: Tensor, draw: Draw, spec: DistributionSpec) -> Tensor:
    """Return the logits of the distributions that are sent."""
    assert draw.sampling is not None
    return rows if spec.raw else process_logits(rows, draw.sampling)
