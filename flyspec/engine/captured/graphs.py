"""Makes steps of fixed shape fast: compiles layers, and captures programs as graphs of the device's
operations, to replay them.

In a graph of eager operations, an 8B model would spend a third of a step in norms, rotations and
additions. Each decoder layer is compiled by itself: all are alike, so one compilation serves them,
and attention and the cache's writes stay outside of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import distributed
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from flyspec.engine.attention import hook
from flyspec.engine.captured.program import Program
from flyspec.engine.compiling import allow_many_shapes
from flyspec.engine.kv_memory import KVCache

log = logging.getLogger(__name__)

Replay = Callable[[], object]
Capture = Callable[[Callable[[], None]], Replay]
"""Captures what a function does on the device; returns what does it again."""

_UNCOMPILED = f"{hook.NAME}_uncompiled"


@lru_cache(maxsize=1)
def _prepare() -> None:
    """Register attention that is not compiled, once: layers are compiled for what they call."""
    allow_many_shapes()
    # Else a layer's index is a constant to compile for, and torch gives up after 8 layers.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    AttentionInterface.register(_UNCOMPILED, torch.compiler.disable(hook.forward))


def compile_layers(model: Any, cache: KVCache) -> None:
    """Compile the layers in place, each when it first runs.

    transformers' decoder layers are `GradientCheckpointingLayer`s; a model without any stays as it
    is.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if layers:
        _prepare()
        model.set_attn_implementation(_UNCOMPILED)
        cache.update = torch.compiler.disable(cache.update)  # type: ignore[method-assign]
    for layer in layers:
        layer.compile(dynamic=True)


def captures_collectives() -> bool:
    """True if the sums of a tensor-parallel group, if there is one, can be part of a graph."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return str(distributed.get_backend()) == "nccl"


_ONE_AT_A_TIME = threading.Lock()
"""torch allows one capture in a process."""


class CudaCapture:
    """Captures CUDA graphs (HIP graphs on ROCm) that share one pool of memory.

    They may: one runs at a time, and none leaves results there that are needed later. For the
    current device.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # one: libraries keep workspaces for each

    def __call__(self, run: Callable[[], None]) -> Replay:
        with _ONE_AT_A_TIME:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()
            side, graph = self._stream, torch.cuda.CUDAGraph()
            # Libraries set themselves up in the first runs, which must not be captured.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            # Other threads may use the device meanwhile: another model of this process.
            with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
                run()
        return graph.replay


class Graphs:
    """Programs by key, each captured when it is first wanted. A key must hold all that they are.

    Without `capture`, or once a capture has failed, programs run eagerly, which does the same work.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture, self._captured = capture, 0
        self._programs: dict[Hashable, tuple[Any, Replay]] = {}

    @property
    def fixed(self) -> bool:
        """True if fixed shapes, with their padding, are worth it."""
        return self._capture is not None

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: Hashable, make: Callable[[], Any]) -> tuple[Any, Replay]:
        """Return the program of this key, made if need be, and what runs it."""
        found = self._programs.get(key)
        if found is None:
            program = make()
            found = self._programs[key] = program, self._replay(program)
        return found

    def _replay(self, program: Program) -> Replay:
        if self._capture is None:
            return program.run
        program.idle()
        try:
            replay = self._capture(program.run)
        except torch.OutOfMemoryError:
            log.warning("no memory to capture a step; lower --gpu-memory-utilization")
            return program.run
        except RuntimeError as error:
            log.warning(
                "steps are not captured as graphs, which makes them slower: the model does what a "
                "graph cannot: %s", " ".join(str(error).split())[:300]
            )  # fmt: skip
            if not self._captured:
                self._capture = None
            return program.run
        self._captured += 1
        return replay
