"""Fixtures of the tests on a device."""

import gc

import pytest
import torch
from torch.nn.attention import flex_attention

from tests.gpu.devices import ON_CUDA


@pytest.fixture(autouse=True)
def uncompiled_on_a_cpu(monkeypatch):
    """FlexAttention's own formula: a CPU has no kernel for every type."""
    if not ON_CUDA:
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture(autouse=True)
def memory_given_back():
    """Graphs hold their memory until they are collected."""
    yield
    if ON_CUDA:
        gc.collect()
        torch.cuda.empty_cache()
