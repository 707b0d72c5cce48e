"""A CUDA graph of the stand-in device: what a block does there, to be done again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from tests.stand_in import computes, memory, share, tensors_in, written
from tests.stand_in_counts import capturing, count_operation


class StandInGraph:
    """The operations of a block, without its host code, on the memory that the block used.

    As for CUDA, to capture computes nothing: memory from before the block is as it was, and the
    block's own results mean nothing until `replay` (here they are NaN, or 0 for integers). What the
    host computed, numbers and shapes, is part of the graph; new inputs are copied into the tensors
    that the block read.
    """

    def __init__(self) -> None:
        self._launches: list[_Launch] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a block, which must neither transfer nor wait. Raises `RuntimeError`."""
        recording = _Recording()
        with capturing(recording.execute):
            try:
                yield
            finally:
                recording.undo()
        self._launches = recording.launches

    def replay(self) -> None:
        """Run the operations: one launch, which reads and writes the memory of the block."""
        count_operation()
        with torch.inference_mode():
            for launch in self._launches:
                leaves = tree_leaves(launch.func(*launch.args, **launch.kwargs))
                for place, made in launch.made.items():
                    made.copy_(leaves[place])


class _Launch(NamedTuple):
    """An operator over CPU tensors, and which leaves of its result are new memory."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: dict[int, Tensor]


class _Recording:
    """Runs a block's operators, so that the block sees shapes, and can undo what they wrote."""

    def __init__(self) -> None:
        self.launches: list[_Launch] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def execute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        self._keep(tensors_in(written(func, args, kwargs)))
        result = func(*args, **kwargs)
        made = {
            place: leaf
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and not any(share(leaf, other) for other in given)
        }
        self._made |= {memory(tensor): tensor for tensor in made.values()}
        if computes(func) and (made or func._schema.is_mutable):
            self.launches.append(_Launch(func, args, kwargs, made))
        return result

    def _keep(self, written: Sequence[Tensor]) -> None:
        """Remember memory from before the block, about to be written for the first time."""
        for tensor in written:
            if memory(tensor) not in self._made and memory(tensor) not in self._before:
                storage = tensor.untyped_storage()
                self._before[memory(tensor)] = storage, storage.clone()

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        with torch.inference_mode():
            for tensor in self._made.values():
                everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                everything.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
