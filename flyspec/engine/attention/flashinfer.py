"""Attention over blocks by FlashInfer's paged wrapper, planned on the host once a step.

`BatchPrefillWithPagedKVCacheWrapper` takes ragged queries, so rounds, plain tokens and prompts run
in one call without padding; with `use_cuda_graph`, its buffers and its batch size are fixed. What
a padded shape has too many rows goes to one more sequence, which reads block 0.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.attention.base import Attending
from flyspec.engine.attention.flex import uncopied
from flyspec.engine.attention.paged import HostPlaces, PagedAttention, PagedStep, Places
from flyspec.engine.captured.shapes import StepShape
from flyspec.engine.kv_memory import KVLayer, PagedCache
from flyspec.engine.upload import upload

WORKSPACE_BYTES = 384 << 20
"""For partial sums; shared by all steps, which run one after the other. Steps in graphs always
divide their keys among processors, which takes more than FlashInfer's recommendation, 128 MiB."""
TYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 128, 256)
"""Types and head sizes that FlashInfer's kernels exist for."""


Kind: TypeAlias = tuple[Attending, int, int]
"""A layer's parameters: its query heads and their size."""


def unavailable(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Return why FlashInfer cannot serve such a model; None if it can."""
    if device.type != "cuda" or torch.version.hip:
        return f"FlashInfer runs on NVIDIA GPUs, and the model is on {device}"
    if dtype not in TYPES or head_size not in HEAD_SIZES:
        return f"FlashInfer has no kernels for {dtype} with heads of {head_size}"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # of its many native parts, too
        return f"FlashInfer cannot be imported (pip install flashinfer-python): {error}"
    return None


class FlashInferAttention(PagedAttention):
    """Single tokens drawn on the device are left to others: their plan would be a host's."""

    name = "flashinfer"
    ragged = True

    def __init__(self, cache: PagedCache, device: torch.device) -> None:
        super().__init__(cache)
        self.library: Any = importlib.import_module("flashinfer")
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._singles = uncopied(cache, device)
        self._singles.windows = self.windows
        self._uncaptured: dict[Kind, Any] = {}
        self._planned: torch.cuda.Event | None = None

    def step(self, shape: StepShape, places: Places, once: bool = False) -> PagedStep:
        return _FlashInferStep(self, shape, once)

    def uncaptured(self, kind: Kind) -> Any:
        """Return the wrapper that steps that run once share."""
        if kind not in self._uncaptured:
            wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            self._uncaptured[kind] = wrapper
        return self._uncaptured[kind]

    def wait(self) -> None:
        """Wait until the last plan is on the device: its host memory is the next one's."""
        if self._planned is not None:
            self._planned.synchronize()

    def planned(self) -> None:
        if self.workspace.is_cuda:
            stream = torch.cuda.current_stream(self.workspace.device)
            self._planned = stream.record_event(self._planned)

    def following(self, shape: StepShape, places: Places) -> PagedStep:
        return self._singles.step(shape, places)


class _FlashInferStep(PagedStep):
    """Has a wrapper for each kind of layer, made when the first one of the kind is run."""

    backend: FlashInferAttention

    def __init__(self, backend: FlashInferAttention, shape: StepShape, once: bool) -> None:
        super().__init__(backend)
        self._shape, self._once = shape, once
        self._wrappers: dict[Kind, Any] = {}
        self._types: dict[Kind, torch.dtype] = {}
        self._arguments: tuple[Tensor, ...] = ()

    def plan(self, places: HostPlaces) -> None:
        cache = self.backend.cache
        lists = page_lists(places, cache.blocks, cache.block_size, self._shape.tokens)
        queries, ends, blocks, last = map(torch.from_numpy, lists)
        self._arguments = queries, ends, upload(blocks, self.backend.workspace.device), last
        for kind in self._wrappers:
            self._plan(*kind)

    def begin(self) -> None: ...

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        kind = (how, query.shape[0], query.shape[2])
        if kind not in self._wrappers:
            self._types[kind] = query.dtype
            self._wrappers[kind] = self.backend.uncaptured(kind) if self._once else self._wrapper()
            self._plan(*kind)
        out: Tensor = self._wrappers[kind].run(
            query.transpose(0, 1).contiguous(), (layer.keys, layer.values)
        )
        return out

    def _wrapper(self) -> Any:
        backend, device = self.backend, self.backend.workspace.device
        batch = self._shape.sequences + 1
        most = self._shape.sequences * backend.cache.blocks.shape[1] + 1

        def buffer(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return backend.library.BatchPrefillWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(batch + 1),
            paged_kv_indptr_buf=buffer(batch + 1),
            paged_kv_indices_buf=buffer(most),
            paged_kv_last_page_len_buf=buffer(batch),
            # Hopper's own kernels neither divide keys nor join the heads that share some.
            backend="fa2",
        )

    def _plan(self, how: Attending, heads: int, dim: int) -> None:
        kind, cache = (how, heads, dim), self.backend.cache
        self.backend.wait()
        self._wrappers[kind].plan(
            *self._arguments,
            heads,
            cache.kv_layers[0].num_heads,
            dim,
            cache.block_size,
            causal=True,
            sm_scale=how.scale,
            window_left=-1 if how.window is None else how.window - 1,
            logits_soft_cap=how.softcap,
            q_data_type=self._types[kind],
        )
        self.backend.planned()


def page_lists(
    places: HostPlaces, blocks: NDArray[np.int32], block_size: int, tokens: int
) -> tuple[NDArray[np.int32], ...]:
    """Return arguments of FlashInfer's `plan` for a ragged step of `tokens` rows, int32.

    They are the ends of each sequence's queries and of its blocks, both from 0 on; the blocks; the
    tokens in the last block of each. One more sequence is for padding. `blocks` is the block table;
    sequences of length 0 are padding and have no rows.
    """
    rows, ends, lengths = places
    counts = -(-ends // block_size)
    own = [blocks[row - 1, :count] for row, count in zip(rows, counts, strict=True) if count]
    every = np.concatenate([*own, np.zeros(1, np.int32)]).astype(np.int32)
    queries = [*lengths, tokens - lengths.sum()]
    last = np.where(ends > 0, (ends - 1) % block_size + 1, 0)
    return (
        np.cumsum([0, *queries]).astype(np.int32),
        np.cumsum([0, *counts, 1]).astype(np.int32),
        every,
        np.array([*last, block_size], np.int32),
    )
