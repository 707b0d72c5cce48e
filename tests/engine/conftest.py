"""Shared fixtures of the engine's tests."""

import pytest
import torch
from torch.nn.attention import flex_attention


@pytest.fixture(scope="module")
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
