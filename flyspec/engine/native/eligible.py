"""Eligibility of a model for the native step, as far as its configuration shows. No torch."""

from __future__ import annotations

from typing import Any

from flyspec.engine.native.family import unsupported
from flyspec.engine.native.library import Library, find


def library_for(
    name: str, config: Any, device: str, dtype: str, block_size: int | None
) -> Library | str:
    """Return the compiled step for a model of a single-process service, or why there is none.

    `block_size` is `--block-size`. Before it serves, the step must also pass its trial.
    """
    if not device.startswith("cpu"):
        return f"{name} is on {device}"
    if dtype != "bfloat16":
        return f"{name} is in {dtype}, and the native step supports only bfloat16"
    if reason := unsupported(config):
        return f"{name}: {reason}"
    if block_size:
        return f"--block-size {block_size}: the native step supports only 0"
    library = find()
    return f"no native step: {library}" if isinstance(library, str) else library


def serves_natively(config: Any) -> bool:
    """True if the native step is available and supports models of this configuration."""
    return unsupported(config) is None and isinstance(find(), Library)
