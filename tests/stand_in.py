"""A device for tests, "standin": CPU memory that meets host code as a GPU's does.

On a GPU, a stray `.item()` or a boolean index makes the host wait for the device, and a captured
step fails there. On a CPU both go unseen. Here they are counted, or refused
(`tests.stand_in_counts`), and what was captured is replayed (`tests.stand_in_graph`).

A tensor of the device wraps a CPU tensor: every operation runs on those, and a view wraps a view.
torch offers devices written in Python experimentally (`torch.utils.backend_registration`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flyspec.engine import devices
from tests.stand_in_counts import Kind, capturing_with, count_operation, note

NAME = "standin"


class StandInTensor(Tensor):
    """A tensor of the stand-in device, in the memory of the CPU tensor `elem`."""

    elem: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor) -> StandInTensor:
        tensor: StandInTensor = Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device(NAME, 0),
            storage_size=1 << 60,  # `_follow` may make it larger
        )
        tensor.elem = elem
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        note("reads", "repr")
        return f"StandInTensor({self.elem!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), format_spec)

    def __setitem__(self, key: Any, value: Any) -> None:
        # For CUDA, torch makes the value a CPU tensor too; for other devices one of the device.
        if isinstance(value, bool | int | float | complex):
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(key, value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        note("reads", "numpy")
        raise TypeError(f"can't convert {self.device} tensor to numpy; use Tensor.cpu() first")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, StandInTensor):
            raise TypeError(f"data on {value.device} cannot replace data on {self.device}; move it")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.elem = value.elem


_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty,
    _aten.empty_strided,
    _aten.empty_like,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_INDEXING = {_aten.index, _aten._unsafe_index}
_INDEXED_WRITING = {
    _aten.index_put,
    _aten.index_put_,
    _aten._index_put_impl_,
    _aten._unsafe_index_put,
}
# CUDA has kernels for it; torch composes it of small operations for this device. That cannot be
# helped outside of inference mode.
_WHOLE = {_aten.scaled_dot_product_attention}


def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator some of whose arguments are on the device, or which creates a tensor there.

    In inference mode torch leaves compositions whole; what they are composed of is what counts.
    """
    packet = func.overloadpacket
    if packet not in _WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ):
        return func.decompose(*args, **kwargs)
    _check_devices(func, args, kwargs)
    transfer, hidden = _transfer(func, args, kwargs), _is_hidden(func, args, kwargs)
    if transfer:
        note(transfer, func.name())
    if hidden:
        note("hidden", func.name())
    execute = capturing_with()
    on_device = kwargs.get("device") is None or kwargs["device"].type == NAME
    given = tensors_in((args, kwargs))
    known: dict[int, Tensor] = {}

    def unwrap(tensor: Tensor) -> Tensor:
        if isinstance(tensor, StandInTensor):
            inner = tensor.elem
        else:  # a captured number stays what it is
            inner = tensor if execute is None else _frozen(tensor)
        known[id(inner)] = tensor
        return inner

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in known or not on_device:
            return known.get(id(tensor), tensor)
        # What torch notes about a view of an ordinary tensor, an inference tensor cannot hold.
        ordinary = any(not t.is_inference() and share(tensor, _inner(t)) for t in given)
        with torch.inference_mode(False) if ordinary else nullcontext():
            return StandInTensor(tensor)

    inner_args, inner = tree_map_only(Tensor, unwrap, (tuple(args), dict(kwargs)))
    if on_device and inner.get("device") is not None:
        inner["device"] = torch.device("cpu")
    if execute is None:
        result = func(*inner_args, **inner)
        changed = func._schema.is_mutable or not _are_views(result, given)
        if changed and not transfer and computes(func):
            count_operation()
    else:
        result = execute(func, inner_args, inner)
    if func._schema.is_mutable:
        _follow(given)
    return tree_map_only(Tensor, wrap, result)


def computes(func: Any) -> bool:
    """True if an operator does anything to memory, rather than to a tensor's shape or existence."""
    return func.overloadpacket not in _ALLOCATIONS and torch.Tag.inplace_view not in func.tags


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    names = (parameter.name for parameter in func._schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return [
        given.get(parameter.name)
        for parameter in func._schema.arguments
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]


def _frozen(number: Tensor) -> Tensor:
    """A copy of a host's tensor, unless it is a Python number, which decides no result's type."""
    narrow = {torch.int64: torch.int8, torch.float64: torch.float16}.get(number.dtype)
    if narrow and torch.result_type(torch.empty((), dtype=narrow), number) == narrow:
        return number
    return number.clone()


def _inner(tensor: Tensor) -> Tensor:
    return tensor.elem if isinstance(tensor, StandInTensor) else tensor


def share(one: Tensor, other: Tensor) -> bool:
    """True if two CPU tensors are views of one memory."""
    return memory(one) == memory(other)


def memory(tensor: Tensor) -> int:
    """What identifies a CPU tensor's memory while it lives."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _are_views(result: Any, given: Sequence[Tensor]) -> bool:
    """True if all tensors of an operator's result are views of its arguments."""
    return all(any(share(made, _inner(other)) for other in given) for made in tensors_in(result))


def _follow(given: Sequence[Tensor]) -> None:
    """Give wrappers the shape that an operator in place, or with `out`, gave their memory."""
    for tensor in given:
        if not isinstance(tensor, StandInTensor):
            continue
        layout = tensor.elem.shape, tensor.elem.stride(), tensor.elem.storage_offset()
        if layout != (tensor.shape, tensor.stride(), tensor.storage_offset()):
            python = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
            with torch._C._ExcludeDispatchKeyGuard(python):
                _aten.as_strided_.default(tensor, *layout)


def _check_devices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `RuntimeError` for tensors of two devices, as CUDA does, apart from numbers to read."""
    packet = func.overloadpacket
    if packet is _aten.copy_:
        return
    targets = {id(tensor) for tensor in tensors_in(written(func, args, kwargs))}
    if packet in _INDEXING | _INDEXED_WRITING and isinstance(args[0], StandInTensor):
        for index in args[1]:
            if index is not None and index.device.type == "cpu":
                note("writes", str(packet))
        args = (args[0], *args[2:])
    tensors = tensors_in((args, kwargs))
    elsewhere = [t for t in tensors if t.device.type != NAME]
    other = {str(t.device) for t in elsewhere if t.dim() or id(t) in targets}
    if other and any(t.device.type == NAME for t in tensors):
        raise RuntimeError(
            f"{packet}: expected all tensors to be on the same device, but found at least two "
            f"devices, {NAME}:0 and {', '.join(sorted(other))}"
        )


def _transfer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
    """Kind of transfer if an operator copies to the host or from it, rather than computing."""
    packet = func.overloadpacket
    if packet is _aten.copy_:
        target, source = args[:2]
        if source.device == target.device:
            return None
        return "writes" if target.device.type == NAME else "reads"
    if packet is _aten._to_copy:
        device = kwargs.get("device")
        return "reads" if device is not None and device.type != NAME else None
    return "reads" if torch.Tag.data_dependent_output in func.tags else None


def _is_hidden(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in _INDEXING | _INDEXED_WRITING:
        if packet in _INDEXED_WRITING and len(args[1]) == 1 and args[2].device.type == "cpu":
            return False  # a number: CUDA fills under the mask
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return any(mask.device.type == NAME for mask in masks)
    if packet is _aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in func.tags


class _Module:
    """`torch.standin`, with what torch and our code ask of `torch.cuda`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        note("synchronized", "synchronize")

    # The CPU's generator serves this device too.
    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


@lru_cache(maxsize=1)
def register() -> torch.device:
    """Make the device known to torch, for the rest of the process, and return it."""
    # Not as the machine's accelerator, on which transformers would put its meshes.
    accelerator = torch._C._get_accelerator()
    _setup_privateuseone_for_python_backend(NAME, _Module())
    torch._C._get_accelerator = lambda *_: accelerator
    devices._DEVICE = re.compile(f"{devices._DEVICE.pattern}|({NAME})")
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    # All that torch asks of the device itself: the rest reaches `__torch_dispatch__`.
    for func in (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.tril_indices.default,
        _aten.triu_indices.default,
    ):
        library.impl(func, partial(_create, func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return torch.device(NAME, 0)


_libraries: list[torch.library.Library] = []
"""Registrations end with their library."""


def _create(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _dispatch(func, args, kwargs)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Any:
    """What `torch.tensor` asks for: it keeps the copy from `__torch_dispatch__`."""
    return _dispatch(_aten.copy_.default, (target, source), {})
