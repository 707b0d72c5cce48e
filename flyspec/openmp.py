"""Busy waiting of OpenMP's threads in a service whose steps llama.cpp runs."""

from __future__ import annotations

import os

from flyspec.drafter_names import head_directories
from flyspec.model_files import is_gguf

SPINS, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""Environment variables that libgomp reads when it is loaded, with torch or llama.cpp."""
_BRIEF_SPINS = "4000"
"""Some 0.1 ms: longer than a step's threads wait for each other."""


def openmp_environment(target: str, heads: str) -> dict[str, str]:
    """Return the environment variables for a target with `--heads`; none if the user chose.

    libgomp's threads turn 300,000 times before they sleep, for milliseconds: between two steps of
    plain decoding they need not be woken. If the target and a draft model beside it are GGUF files,
    a single thread drafts between its steps, and the others would keep their cores from all who
    send the verdict to the client.
    """
    if SPINS in os.environ or POLICY in os.environ or not is_gguf(target):
        return {}
    return {SPINS: _BRIEF_SPINS} if any(map(is_gguf, head_directories(heads).values())) else {}
