"""Limits of compiling for a GPU with torch: a C compiler is needed, shapes are few."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

SHAPES = 256
"""Shapes that a function may be compiled for. Beyond torch's own limit, 8, it would run eagerly."""
INSTALL = "install gcc and Python's headers (Debian: gcc, libc6-dev, python3-dev)"

_eager = False


def settle(enforce_eager: bool) -> None:
    """Set whether this process compiles nothing even where it can (`--enforce-eager`)."""
    global _eager
    _eager = enforce_eager


def refusal() -> str:
    """Return why this process compiles nothing; empty if torch may compile."""
    return "--enforce-eager" if _eager else compiler_problem()


def compiler_problem() -> str:
    """Return why Triton, torch's compiler for GPUs, cannot build what starts its kernels.

    It looks for a C compiler in the same way.
    """
    named = os.environ.get("CC")
    if not any(map(shutil.which, (named,) if named else ("gcc", "clang"))):
        sought = f"CC={named} is not there" if named else "there is no C compiler, gcc or clang"
        return f"{sought}; {INSTALL}"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    return "" if (headers / "Python.h").is_file() else f"there is no Python.h; {INSTALL}"


@lru_cache
def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Return a function compiled for each shape or for all, or as it is if none may be."""
    if refusal():
        return function
    import torch

    if not dynamic:
        allow_many_shapes()
    return torch.compile(function, dynamic=dynamic)


def allow_many_shapes() -> None:
    import torch

    limits = torch._dynamo.config
    limits.recompile_limit = max(SHAPES, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(SHAPES, limits.accumulated_recompile_limit)
