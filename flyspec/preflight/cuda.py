"""Check for usable GPUs, without importing torch, which takes seconds."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

from flyspec.engine.devices import NamedDevice, no_cuda, read_device
from flyspec.errors import ConfigError
from flyspec.spelling import install_command

_DEVICES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class TorchBuild(NamedTuple):
    """The installed torch: its version, and of CUDA or ROCm if it was built for them."""

    version: str
    cuda: str | None
    rocm: str | None


def torch_build() -> TorchBuild | None:
    """Return the installed torch's version, from the file that has it; None without torch."""
    package = PathFinder.find_spec("torch")
    if package is None or package.origin is None:
        return None
    spec = spec_from_file_location("torch_version", Path(package.origin).with_name("version.py"))
    if spec is None or spec.loader is None:
        return None
    version = module_from_spec(spec)
    try:
        spec.loader.exec_module(version)
    except (OSError, ImportError):
        return TorchBuild("of unknown version", None, None)
    cuda, rocm = (getattr(version, name, None) for name in ("cuda", "hip"))
    return TorchBuild(str(version.__version__), cuda, rocm)


def cuda_problem() -> str:
    """Return why no GPU can be used; empty if perhaps one can."""
    build = torch_build()
    if build is None:
        return f"torch is not installed ({install_command('models')})"
    if build.rocm:
        return ""
    if not build.cuda:
        return f"the installed torch {build.version} is built without CUDA"
    if os.environ.get(_VISIBLE) in ("", "-1"):
        return f"{_VISIBLE} hides every GPU"
    windows = _DEVICES / "dxg"  # WSL
    if not (windows.exists() or any(_DEVICES.glob("nvidia[0-9]*"))):
        return "this machine has no NVIDIA GPU, or no driver for it"
    return ""


def check_device(device: str) -> NamedDevice:
    """Return the device that a service will use for `--device`. Raises `ConfigError`."""
    named = read_device(device)
    problem = cuda_problem() if named is None or named.type == "cuda" else ""
    if named is None:
        return NamedDevice("cpu" if problem else "cuda")
    if problem:
        raise no_cuda(device, problem)
    return named


def check_torch(setting: str) -> None:
    """Raise `ConfigError` if what a model needs is not installed."""
    if missing := [name for name in ("torch", "transformers") if not _installed(name)]:
        raise ConfigError(f"{setting}: needs {' and '.join(missing)}: {install_command('models')}")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
