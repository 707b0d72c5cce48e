"""A tiny pair, and a stack of it in separate processes, shared by all tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions


@pytest.fixture(scope="session")
def models(model_dirs: tuple[str, str]) -> list[str]:
    """Flags that name a tiny pair."""
    return ["--model", model_dirs[0], "--draft-model", model_dirs[1]]


@pytest.fixture(scope="session")
async def stack(models: list[str]) -> AsyncIterator[Stack]:
    async with Stack(StackOptions(model=models[1], draft_model=models[3])) as running:
        yield running
