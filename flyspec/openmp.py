"""How long OpenMP's threads wait in a busy loop, in a service where llama.cpp runs a model."""

from __future__ import annotations

import os
from collections.abc import Iterable

from flyspec.model_files import is_gguf

SPINS, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""Environment variables that libgomp reads when it is loaded, with torch or llama.cpp."""
_BRIEF_SPINS = "5000"


def openmp_environment(models: Iterable[str]) -> dict[str, str]:
    """Return the environment variables for a service of these models; none if the user chose.

    libgomp's threads turn 300,000 times before they sleep, for milliseconds. In a step of llama.cpp
    they wait for each other for microseconds; after it they keep a core from the draft model and
    from the other services. Operations of torch are slower with brief waits, so nothing changes
    where all models are safetensors.
    """
    if SPINS in os.environ or POLICY in os.environ or not any(map(is_gguf, filter(None, models))):
        return {}
    return {SPINS: _BRIEF_SPINS}
