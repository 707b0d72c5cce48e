"""A stack shared by all tests here, and its expected output."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from flyspec.engine.loading import load_model
from tests.orchestrator.near_target import LogProbs, greedy_of
from tests.orchestrator.stacks import start_stack


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """All targets here must have the same numerics, whichever test comes first."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
async def stack(model_dirs):
    async with start_stack(model_dirs) as running:
        yield running


@pytest.fixture(scope="session")
def greedy(model_dirs):
    return greedy_of(model_dirs[0])


@pytest.fixture(scope="session")
def near_dirs(model_dirs, tmp_path_factory):
    """A target, and as drafter the same with noisy weights, right three times in four."""
    directory = tmp_path_factory.mktemp("near")
    loaded = load_model(model_dirs[0], "cpu", "float64")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.add_(0.005 * noise)
    loaded.model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_dirs[0]).save_pretrained(directory)
    return model_dirs[0], str(directory)


@pytest.fixture(scope="session")
async def near_stack(near_dirs):
    async with start_stack(near_dirs, draft={"dtype": "float64"}) as running:
        yield running


@pytest.fixture(scope="session")
def log_probs(near_dirs):
    return LogProbs(near_dirs[0])
