"""A tiny random target, engines over it, and verify services on free ports."""

from contextlib import asynccontextmanager

import pytest
import torch

from flyspec import rpc
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.engine.scheduler import StepBudget
from flyspec.v1 import verify_pb2_grpc
from tests.autojudges import random_judge
from tests.engine.random_models import eagerly
from tests.orchestrator.near_target import greedy_of
from tests.tiny import HIDDEN_SIZE
from tests.verify_service.sessions import serving
from verify_service.engine import VerifyEngine


@pytest.fixture(scope="session")
def target_dir(model_dirs):
    return model_dirs[0]


@pytest.fixture(scope="session")
def loaded(target_dir):
    torch.set_num_threads(1)
    return load_model(target_dir, "cpu", "float64")


@pytest.fixture(scope="session")
def served(target_dir):
    """A model for runners, which replace its attention; `loaded` is what they are compared with."""
    return load_model(target_dir, "cpu", "float64")


JUDGE = random_judge(HIDDEN_SIZE)
CACHES = {"slots": None, "blocks": Paging(16), "fixed": Paging(16, attention="sdpa")}
"""Slots; blocks, attended to by segments; blocks, in the fixed shapes of captured steps."""


@pytest.fixture
def engine(served, loaded, request):
    """An engine over slots, or over what the test's indirect parameter names in `CACHES`."""
    kind = getattr(request, "param", "slots")
    runner = ModelRunner(served, num_slots=4, paging=CACHES[kind])
    if kind == "fixed":
        runner.accelerate(eagerly, compiled=False)
        runner.cache.forget()
    budget = StepBudget(prefill_chunk=16)
    engine = VerifyEngine(runner, loaded.tokenizer, 64, budget=budget, autojudge=JUDGE)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def greedy(target_dir):
    return greedy_of(target_dir)


@pytest.fixture
def service(engine, loaded):
    @asynccontextmanager
    async def start(**settings):
        async with (
            serving(engine, loaded.tokenizer, **settings) as address,
            rpc.connect(address) as channel,
        ):
            yield verify_pb2_grpc.VerifyServiceStub(channel)

    return start
