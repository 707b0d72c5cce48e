"""Models for the command line."""

from __future__ import annotations

import pytest

from tests.tiny import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a tiny pair."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model(folder / "target", seed=0)
    draft = make_model(folder / "draft", seed=1, hidden_size=32)
    return ["--model", str(target), "--draft-model", str(draft)]
