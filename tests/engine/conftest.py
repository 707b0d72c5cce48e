"""Shared fixtures of the engine's tests."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention


@pytest.fixture
def one_thread():
    """Small products are fastest this way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention's own formula, which exists in float64."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture(params=[True, False], ids=["inference", "ordinary"])
def stand_in(request):
    """The stand-in device, in inference mode and out of it: torch hands it other operators there.

    Out of it, no gradients are kept either.
    """
    from tests.stand_in import register  # changes torch for the rest of the process

    register()
    with torch.inference_mode(request.param), torch.no_grad():
        yield
