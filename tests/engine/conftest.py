"""What the engine's tests have in common."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_thread():
    """Small products run fastest so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
