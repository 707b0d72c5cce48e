"""The compiled step: its instruction sets, the one that runs here, and its C interface.

`step.cpp` is compiled once per instruction set when flyspec is installed (pyproject.toml). The best
one that the processor supports is loaded; the environment variable FLYSPEC_NATIVE names another, or
is "off".
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "FLYSPEC_NATIVE"
OFF = "off"

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"})
INSTRUCTION_SETS = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma"}),
}
"""Names of the compiled steps, best first, with the flags in /proc/cpuinfo that each needs."""


class LayerStruct(ctypes.Structure):
    """`Layer` in step.cpp."""

    POINTERS = (
        "qkv", "out", "gate_up", "down",
        "qkv_bias", "out_bias", "gate_up_bias", "down_bias",
        "norm", "mlp_norm", "q_norm", "k_norm",
    )  # fmt: skip
    _fields_ = (*((name, c_void_p) for name in POINTERS), ("window", c_int64))


class ShapeStruct(ctypes.Structure):
    """`Shape` in step.cpp."""

    SIZES = (
        "hidden", "heads", "kv_heads", "dim", "intermediate", "vocabulary", "layers", "slots",
        "length", "threads",
    )  # fmt: skip
    _fields_ = (
        *((name, c_int64) for name in SIZES),
        ("epsilon", c_double),
        ("scale", c_double),
        ("layer", POINTER(LayerStruct)),
        *((name, c_void_p) for name in ("head", "embedding", "norm", "cosines", "sines", "cache")),
        *((name, c_void_p) for name in ("token_norm", "drafts")),
        *((name, c_int64) for name in ("num_drafts", "normed_residual", "normed_features")),
    )


class SamplerStruct(ctypes.Structure):
    """`Sampler` in sampling.h."""

    _fields_ = (
        ("seed", c_uint64), ("key", c_uint64), ("temperature", c_float), ("top_p", c_float),
        ("min_p", c_float), ("top_k", c_int32), ("stream", c_int32),
    )  # fmt: skip


class BatchStruct(ctypes.Structure):
    """`Batch` in step.cpp."""

    SIZES = ("rows", "num_wanted", "num_kept", "num_hidden", "stride")
    POINTERS = (
        "ids", "positions", "slots", "wanted", "kept", "hidden_layers", "logits", "hidden",
        "chances", "tokens", "samplers", "features", "own", "places", "up",
    )  # fmt: skip
    _fields_ = (*((name, c_int64) for name in SIZES), *((name, c_void_p) for name in POINTERS))


class Library(NamedTuple):
    """A loaded step and the name of its instruction set."""

    name: str
    functions: ctypes.CDLL


def load(name: str, path: Path) -> Library:
    """Load a compiled step. Raises `OSError` if that fails."""
    functions = ctypes.CDLL(str(path))  # calls release the GIL
    functions.flyspec_open.restype = c_void_p
    functions.flyspec_open.argtypes = [POINTER(ShapeStruct)]
    functions.flyspec_close.argtypes = [c_void_p]
    functions.flyspec_forward.argtypes = [c_void_p, POINTER(BatchStruct)]
    functions.flyspec_draw.argtypes = [
        c_void_p, POINTER(BatchStruct), *[c_void_p] * 5, c_int, *[c_void_p] * 6
    ]  # fmt: skip
    functions.flyspec_copy.restype = None
    functions.flyspec_copy.argtypes = [c_void_p, c_int, c_int, c_void_p, c_void_p]
    functions.flyspec_sample.restype = None
    functions.flyspec_sample.argtypes = [c_void_p, c_int, c_int, c_void_p, c_void_p]
    return Library(name, functions)


@lru_cache(maxsize=8)
def find(wanted: str | None = None) -> Library | str:
    """Return the step that runs here, or why there is none; `wanted` defaults to FLYSPEC_NATIVE."""
    wanted = wanted or os.environ.get(ENVIRONMENT, "")
    if wanted == OFF:
        return f"{ENVIRONMENT}={OFF}"
    if wanted and wanted not in INSTRUCTION_SETS:
        return f"{ENVIRONMENT}={wanted}: not one of {', '.join(INSTRUCTION_SETS)}, {OFF}"
    flags = processor_flags()
    names = [n for n, needed in INSTRUCTION_SETS.items() if needed <= flags and wanted in ("", n)]
    if not names:
        return f"this processor lacks {wanted or 'AVX2'}"
    reason = "it was not compiled when flyspec was installed, perhaps for lack of a compiler"
    for name in names:
        # Several, if more than one Python was installed from this checkout; all are equivalent.
        for path in sorted(Path(__file__).parent.glob(f"step_{name}.*so")):
            try:
                library = load(name, path)
            except OSError as error:
                reason = f"{path.name}: {error}"
                continue
            if not library.functions.flyspec_prepare():
                return library
            reason = "the kernel does not allow this process to use AMX"
    return reason


def processor_flags() -> frozenset[str]:
    """Return the flags of processor and kernel in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((n for n in lines if n.startswith("flags")), "").split())


if __name__ == "__main__":
    found = find()
    print(f"native step: {found}" if isinstance(found, str) else f"native step: {found.name}")
