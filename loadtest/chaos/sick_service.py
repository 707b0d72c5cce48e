"""A service whose model falls ill.

    python -m loadtest.chaos.sick_service KIND CALLS MODULE FLAGS...

MODULE is the service's, `verify_service` or `draft_service`. All of it is real: so many calls of
the model work, and then its device fails, its code raises, its weights are no numbers any more, or
a call does not come back, as KIND says.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import runpy
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from flyspec.engine.loop import StepLoop


def _raises(text: str, model: Any) -> None:
    raise RuntimeError(text)


def _nan(model: Any) -> None:
    """Overwrite the weights of the last norm, of a transformers model or of the native step."""
    packed = getattr(model, "_weights", None)
    if packed is None:
        model.model.model.norm.weight.data.fill_(math.nan)
    else:
        shape = packed.shape
        numbers = (ctypes.c_float * shape.hidden).from_address(shape.norm)
        numbers[:] = [math.nan] * shape.hidden


KINDS: dict[str, Callable[[Any], object]] = {
    "device": partial(_raises, "CUDA error: an illegal memory access was encountered"),
    "raises": partial(_raises, "mat1 and mat2 shapes cannot be multiplied"),
    "nan": _nan,
    "hang": lambda model: threading.Event().wait(),
}


def main() -> None:
    make_ill, calls, module = KINDS[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:4]
    start = StepLoop.start

    def started(engine: Any) -> Any:
        well, numbers = engine.run_batch, itertools.count()

        def run_batch(wants: Any) -> Any:
            if next(numbers) >= calls:
                make_ill(engine.model)
            return well(wants)

        engine.run_batch = run_batch
        return start(engine)

    StepLoop.start = started  # type: ignore[assignment,method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
