"""The native step for every instruction set of this machine, as pyproject.toml says to compile it.

AMX is there everywhere that AVX512-BF16 is: emulated where the processor has none.
"""

import hashlib
import os
import shutil
import subprocess
import tomllib
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from flyspec.engine.native import library
from flyspec.engine.native.library import INSTRUCTION_SETS
from flyspec.engine.native.model import NativeModel
from tests.engine.random_models import loaded_model, make_model

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "flyspec/engine/native/step.cpp"
SOURCES = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
TILES = Path(__file__).with_name("emulated_tiles.h")
EMULATED = "amx, emulated"

_FLAGS = library.processor_flags()
SETS = [name for name, needed in INSTRUCTION_SETS.items() if needed <= _FLAGS]
if "avx512_bf16" in SETS and "amx" not in SETS:
    SETS.append(EMULATED)
needs_step = pytest.mark.skipif(
    not SETS or shutil.which("g++") is None, reason="needs g++ and a processor with AVX2"
)


def pairs(cases):
    """Each case with an instruction set, each set with a case."""
    cases = [*cases]
    both = zip(cycle(cases), cycle(SETS), strict=False)
    return [*islice(both, max(len(cases), len(SETS)))]


def compiler_flags(name):
    """Those of pyproject.toml."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = document["tool"]["setuptools"]["ext-modules"]
    ends = {module["name"].rpartition(".step_")[2]: module for module in modules}
    assert ends.keys() == INSTRUCTION_SETS.keys()
    return ends[name]["extra-compile-args"]


def installed(name):
    """The step compiled at installation, if nothing has changed since."""
    changed = max(path.stat().st_mtime for path in (*SOURCES, ROOT / "pyproject.toml"))
    steps = SOURCE.parent.glob(f"step_{name}.*so")
    return next((path for path in steps if path.stat().st_mtime > changed), None)


@lru_cache
def compiled(name):
    """The step for an instruction set, compiled if necessary."""
    if path := installed(name):
        return library.load(name, path)
    emulated = name == EMULATED
    flags = compiler_flags("avx512_bf16" if emulated else name)
    if emulated:
        flags = [*flags, "-include", str(TILES)]
    contents = [
        *(path.read_bytes() for path in SOURCES),
        TILES.read_bytes(),
        " ".join(flags).encode(),
    ]
    key = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    path = ROOT / "build" / "native" / f"{name.replace(', ', '_')}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        command = ["g++", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(part)]
        subprocess.run(command, check=True)
        part.rename(path)
    found = library.load(name, path)
    assert emulated or not found.functions.flyspec_prepare()
    return found


def native_model(model, name, num_slots=4, context_length=160, threads=1):
    """A model over a compiled step."""
    return NativeModel(loaded_model(model, context_length), num_slots, compiled(name), threads)


SHAPES = {
    "llama": {"hidden_size": 72, "intermediate_size": 100, "head_dim": 16, "vocab_size": 131},
    "llama-biases": {
        "kind": "llama", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
        "attention_bias": True, "mlp_bias": True, "num_attention_heads": 2,
    },
    "llama-scaled-rope": {
        "kind": "llama", "hidden_size": 66, "head_dim": 64, "num_attention_heads": 6,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"hidden_size": 64, "intermediate_size": 200, "tie_word_embeddings": True},
    "qwen3": {
        "hidden_size": 136, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1,
    },
    "mistral": {"hidden_size": 96, "head_dim": 48, "sliding_window": 21},
}  # fmt: skip


def small_model(shape, **changes):
    """A random bfloat16 model of a shape, of logits of order 1."""
    config = {**SHAPES[shape], **changes}
    # The wider, the smaller: attention stays far from uniform and far from a single key.
    config.setdefault("initializer_range", 1.2 / config["hidden_size"] ** 0.5)
    return make_model(config.pop("kind", shape), dtype=torch.bfloat16, **config)
