"""Captures programs as graphs of the device's operations, and replays them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import distributed

from flyspec.engine.captured.program import Program

log = logging.getLogger(__name__)

Replay = Callable[[], object]


class Capture(Protocol):
    """Captures what a function does on the device; returns what does it again."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


def eagerly(run: Callable[[], None]) -> Replay:
    """Capture nothing: the same work, to test it where there are no graphs."""
    return run


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
