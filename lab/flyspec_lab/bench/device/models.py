"""The models of `flyspec bench device`: runners over blocks, their bytes, and a filled cache."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from flyspec.engine.captured.graphs import CudaCapture, eagerly
from flyspec.engine.configuration import own_context_length, read_config
from flyspec.engine.loading import LoadedModel, load_model, resolve_device
from flyspec.engine.model import Step
from flyspec.engine.parallel import weight_bytes
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.flags import AttentionBackendName, Dtype
from flyspec_lab.bench.shapes import random_model, shape_named

Mode = Literal["eager", "captured", "compiled"]
MODES: tuple[Mode, ...] = ("eager", "captured", "compiled")
"""Steps in their own shape; of fixed shapes, as graphs on CUDA; the same with compiled layers. In
this order: a model whose layers are compiled stays so."""


class Wanted(NamedTuple):
    """A model: a shape by name, or a directory or hub id, on a device."""

    flag: str
    shape: str
    model: str
    device: str
    dtype: Dtype


def build(wanted: Wanted, max_length: int) -> LoadedModel:
    """Build or load a model for sequences of up to `max_length` tokens, or fewer if it is limited.

    Raises `ConfigError`.
    """
    if not wanted.shape:
        length = min(max_length, own_context_length(read_config(wanted.model)[1]))
        return load_model(wanted.model, wanted.device, wanted.dtype, length, identify=False)
    device = resolve_device(wanted.device)
    dtype = torch.bfloat16 if wanted.dtype == "auto" else getattr(torch, wanted.dtype)
    shape = shape_named(wanted.flag, wanted.shape)
    return random_model(wanted.shape, shape, device, dtype, max_length)


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
        backend = attention
        if attention == "auto" and self.device.type == "cpu":
            backend = "sdpa"  # fixed shapes have no other way on a CPU
        # One more than the batch, for the trial of captured steps.
        paging = Paging(block_size, attention=backend)
        self.runner = ModelRunner(loaded, batch + 1, paging=paging)
        self.weights = weight_bytes(loaded.model)[0]
        rng = random.Random(0)
        vocab_size, length = loaded.info.vocab_size, loaded.info.context_length
        self.token_ids = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]
        self.attention: str = self.runner._steps.attention.name  # type: ignore[union-attr]
        self._fill(batch)

    def turn_on(self, modes: Sequence[Mode], failures: dict[str, str]) -> Iterator[Mode]:
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

    def steps(self, batch: int, context: int, tokens: int) -> list[Step]:
        """Steps of `tokens` after `context`, each with a row of logits for every token."""
        return [
            Step(slot, context, self.token_ids[slot][context : context + tokens], tokens)
            for slot in range(batch)
        ]

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
