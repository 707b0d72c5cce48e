"""A tiny pair, and a stack of it in separate processes, shared by all tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from tests.tiny import make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a tiny pair."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model(folder / "target", seed=0)
    draft = make_model(folder / "draft", seed=1, hidden_size=32)
    return ["--model", str(target), "--draft-model", str(draft)]


@pytest.fixture(scope="session")
async def stack(models: list[str]) -> AsyncIterator[Stack]:
    async with Stack(StackOptions(model=models[1], draft_model=models[3])) as running:
        yield running
