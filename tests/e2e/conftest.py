"""The bundled models in separate processes, started once for all tests here."""

from __future__ import annotations

import pytest

from flyspec.cli.stack import DEMO_MODELS, Stack, StackOptions


@pytest.fixture(autouse=True, scope="session")
def bundled_models():
    """Skip with a message if there are none."""
    for name in ("target", "draft"):
        if not (DEMO_MODELS / name / "model.safetensors").is_file():
            pytest.skip(f"demo/models/{name} has no weights; run `make models`")


@pytest.fixture(scope="session")
async def stack(bundled_models):
    """float64: no numerical ties. Sequences shorter than the model's limit, for memory."""
    options = StackOptions(
        dtype="float64",
        draft_dtype="float64",
        log_level="warning",
        max_model_len=2560,
    )
    async with Stack(options) as running:
        yield running
