"""Runners over a tiny random model, and draft services on free ports."""

import pytest
import torch
from tokenizers import Tokenizer

from flyspec.config import DraftSettings
from flyspec.engine.loading import load_model
from tests.draft_service.draft_harness import CountingRunner, start_service

TEXT = "the cat sat on the mat and the dog sat on the log while the cat saw the dog run. " * 4


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dir(model_dirs):
    return model_dirs[0]


@pytest.fixture(scope="session")
def loaded(model_dir):
    return load_model(model_dir, "cpu", "float64")


@pytest.fixture(scope="session")
def served(model_dir):
    """A model for runners, which replace its attention; `loaded` is what they are compared with."""
    return load_model(model_dir, "cpu", "float64")


@pytest.fixture
def runner(served):
    return CountingRunner(served, num_slots=4)


@pytest.fixture(scope="session")
def service_with(model_dir):
    """Starts a service with the tiny model in float64; arguments are settings."""

    def start(**settings):
        values = {"model": model_dir, "dtype": "float64", "device": "cpu", "threads": 1, "port": 0}
        return start_service(DraftSettings(**{**values, **settings}))

    return start


@pytest.fixture(scope="session")
async def service(service_with):
    """A service shared by tests that leave no session behind."""
    async with service_with() as running:
        yield running


@pytest.fixture(scope="session")
def prompt(loaded):
    """Token ids of a text that repeats itself."""
    return Tokenizer.from_buffer(loaded.tokenizer.tokenizer_json).encode(TEXT[:110]).ids
