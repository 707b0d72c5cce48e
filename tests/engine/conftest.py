"""Shared fixtures of the engine's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_thread():
    """Small products are fastest this way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
