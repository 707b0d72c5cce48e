"""The bundled models in separate processes, started once for all tests here."""

from __future__ import annotations

import pytest

from flyspec.cli.stack import DEMO_MODELS, Stack, StackOptions

if not (DEMO_MODELS / "target" / "model.safetensors").is_file():
    pytest.skip("the bundled models are not there; run `make models`", allow_module_level=True)


@pytest.fixture(scope="session")
async def stack():
    """float64: no numerical ties."""
    options = StackOptions(dtype="float64", draft_dtype="float64", log_level="warning")
    async with Stack(options) as running:
        yield running
