"""Checks of a GGUF model and its service's settings before anything large is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.devices import read_device
from flyspec.errors import ConfigError
from flyspec.model_files import gguf_path, is_gguf
from flyspec.spelling import install_command

_PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
"""Modules that serving a GGUF file needs, and the packages that have them."""
INSTALL = f"{install_command('llama-cpp')} (llama.cpp is compiled, which takes minutes)"
_PROBE = "flyspec.engine.llama_cpp.probe"
_REBUILD = (
    'CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CXXFLAGS="$CFLAGS" pip install '
    "--force-reinstall --no-deps --no-cache-dir llama-cpp-python"
)
"""A command that builds llama.cpp for this machine without AMX, which GCC 12 miscompiles."""


@cache
def crash() -> str:
    """Return why the installed llama.cpp cannot serve quantised files here; else empty."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode >= 0:  # other errors are told when the model loads
        return ""
    name = signal.Signals(-done.returncode).name
    return (
        f"the installed llama.cpp crashes on this processor ({name} in a quantised product); build "
        f"it again with: {_REBUILD}"
    )


def missing_packages() -> list[str]:
    """Return the packages that serving a GGUF file needs and that are not installed."""
    return [package for module, package in _PACKAGES.items() if find_spec(module) is None]


def serves_gguf(settings: DraftSettings | VerifySettings) -> bool:
    """True if llama.cpp is to serve `--model`. Raises `ConfigError` for what cannot go together."""
    name = settings.model
    if not is_gguf(name):
        if settings.engine == "llama-cpp":
            raise ConfigError(
                f"--engine llama-cpp: --model {name} is not a GGUF file; give one, or --engine auto"
            )
        if settings.n_gpu_layers is not None:
            raise ConfigError(
                f"--n-gpu-layers {settings.n_gpu_layers}: is for GGUF files, which --model {name} "
                "is not; use --device"
            )
        return False
    gguf_path(name)
    check_llama_cpp(f"--model {name}")
    read_device(settings.device)
    for flag, wrong, advice in _unsuitable(settings):
        if wrong:
            raise ConfigError(f"{flag}: not for a GGUF file (--model {name}): {advice}")
    return True


def check_llama_cpp(flag: str) -> None:
    """Raise `ConfigError` if the packages for a flag's GGUF file are missing, or crash here."""
    if missing := missing_packages():
        raise ConfigError(f"{flag}: is a GGUF file, which needs {' and '.join(missing)}: {INSTALL}")
    if problem := crash():
        raise ConfigError(f"{flag}: {problem}")


def _unsuitable(settings: DraftSettings | VerifySettings) -> list[tuple[str, bool, str]]:
    """Flags that llama.cpp does not know: as typed, whether they are set, what to do instead."""
    found = [
        (f"--dtype {settings.dtype}", settings.dtype != "auto",
         "its tensors have the types they were written in; convert it again for others"),
        (f"--block-size {settings.block_size}", bool(settings.block_size),
         "llama.cpp's cache has no blocks; use 0"),
    ]  # fmt: skip
    if isinstance(settings, VerifySettings):
        size = settings.tensor_parallel_size
        found += [
            (f"--tensor-parallel-size {size}", size > 1,
             "llama.cpp itself splits a model over the GPUs it sees"),
            ("--batch-invariant", bool(settings.batch_invariant),
             "llama.cpp has no such mode; the log says how far rows of a batch are from single "
             "steps"),
            (f"--autojudge-file {settings.autojudge_file}", bool(settings.autojudge_file),
             "a judge reads hidden rows, which llama.cpp does not return; serve the safetensors "
             "checkpoint"),
        ]  # fmt: skip
    return found
