"""This machine and what is installed on it: versions, processor, native step, GPUs, extras."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.doctor.gpus import gpus
from flyspec.engine.cache_size import readable
from flyspec.engine.compiling import compiler_problem
from flyspec.engine.device_memory import host_memory
from flyspec.engine.native.library import INSTRUCTION_SETS, find, processor_flags
from flyspec.preflight.cuda import cuda_problem, torch_build
from flyspec.process import available_cores
from flyspec.spelling import install_command

SECTION = "this machine"
_SHOWN = ("flyspec", "transformers", "tokenizers", "grpcio")
_EXTRAS = {
    "http": "the HTTP API",
    "otlp": "--otlp-traces-endpoint",
}
"""Extras that a serving installation may want, with what each is for."""


def machine(with_models: bool, wanted: frozenset[str]) -> Iterator[Diagnosis]:
    """Examine the machine. `wanted`: extras that the settings ask for."""
    versions = [f"python {platform.python_version()}"]
    versions += [f"{name} {known}" for name in _SHOWN if (known := _version(name))]
    build = torch_build()
    if build is not None:
        versions.append(f"torch {build.version}")
    yield Diagnosis(SECTION, "versions", Mark.OK, ", ".join(versions))
    if with_models:
        yield _models(build is not None)
    yield from map(_extra, _EXTRAS, [name in wanted for name in _EXTRAS])
    yield _processor()
    if with_models:
        yield _native()
    yield from _devices()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _models(installed: bool) -> Diagnosis:
    missing = [name for name in _needed("models") if not _version(name)]
    if not installed or missing:
        text = f"missing: {', '.join(missing or ['torch'])}; {install_command('models')}"
        return Diagnosis(SECTION, "models extra", Mark.ERROR, text)
    return Diagnosis(SECTION, "models extra", Mark.OK, "installed")


def _needed(extra: str) -> list[str]:
    """The names of an extra's packages, as flyspec's own metadata declares them."""
    try:
        declared = requires("flyspec") or []
    except PackageNotFoundError:
        return []
    marked = (line.partition(";") for line in declared)
    return [
        _name(requirement)
        for requirement, _, condition in marked
        if condition.replace("'", '"').strip() == f'extra == "{extra}"'
    ]


def _name(requirement: str) -> str:
    for index, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:index]
    return requirement


def _extra(extra: str, wanted: bool) -> Diagnosis:
    missing = [name for name in _needed(extra) if not _version(name)]
    subject, purpose = f"{extra} extra", _EXTRAS[extra]
    if not missing:
        return Diagnosis(SECTION, subject, Mark.OK, f"installed, for {purpose}")
    text = f"not installed; for {purpose}: {install_command(extra)}"
    return Diagnosis(SECTION, subject, Mark.ERROR if wanted else Mark.OK, text)


def _processor() -> Diagnosis:
    flags, cores, memory = processor_flags(), available_cores(), host_memory()
    sets = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    known = f"instruction sets {', '.join(sets)}" if sets else f"{platform.machine()}, no AVX2"
    room = f", {readable(memory.free)} of {readable(memory.total)} memory free" if memory else ""
    facts = {"cores": cores, "instruction_sets": sets}
    if memory:
        facts |= {"memory_total_bytes": memory.total, "memory_free_bytes": memory.free}
    text = f"{cores} core{'s' * (cores > 1)}, {known}{room}"
    return Diagnosis(SECTION, "processor", Mark.OK, text, facts)


def _native() -> Diagnosis:
    found = find()
    if not isinstance(found, str):
        return Diagnosis(SECTION, "native step", Mark.OK, f"compiled for {found.name}")
    text = f"{found}; models run in transformers' modules, which are slower on a CPU"
    compiles = any(map(shutil.which, ("c++", "g++", "clang++")))
    if "not compiled" in found:
        first = "" if compiles else "install a C++ compiler and "
        text += f"; to have it, {first}install flyspec again ({sys.executable} -m pip install ...)"
    supported = any(needed <= processor_flags() for needed in INSTRUCTION_SETS.values())
    return Diagnosis(SECTION, "native step", Mark.WARNING if supported else Mark.OK, text)


def _devices() -> Iterator[Diagnosis]:
    if problem := cuda_problem():
        yield Diagnosis(SECTION, "GPUs", Mark.OK, f"none to use: {problem}")
        return
    found = gpus()
    if not found:
        text = "there may be some, but nvidia-smi does not list them; their memory is unknown"
        yield Diagnosis(SECTION, "GPUs", Mark.WARNING, text)
    for gpu in found:
        text = f"{gpu.name}, {readable(gpu.memory.free)} of {readable(gpu.memory.total)} free"
        yield Diagnosis(SECTION, f"cuda:{gpu.index}", Mark.OK, text)
    if problem := compiler_problem():
        text = f"nothing is compiled for GPUs, so steps take longer: {problem}"
        yield Diagnosis(SECTION, "compiler", Mark.WARNING, text)
    if find_spec("flashinfer") is None:
        how = "on copies of keys and values" if problem else "by FlexAttention"
        text = f"not installed; blocks attend {how}, which is slower"
        yield Diagnosis(SECTION, "FlashInfer", Mark.OK, text)
