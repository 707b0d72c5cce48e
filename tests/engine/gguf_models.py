"""The bundled models as GGUF files, and services' models made from them."""

import pytest

from flyspec import bundled
from flyspec.config import VerifySettings

needs_llama_cpp = pytest.mark.llama_cpp
WHY = "needs llama.cpp: make llama-cpp-test, or pip install '.[llama-cpp]'"


def gguf_file(folder, kind, model=bundled.DRAFT):
    """Convert a bundled model, unless the folder has it; skips the test without the packages."""
    pytest.importorskip("llama_cpp", reason=WHY)
    pytest.importorskip("gguf", reason=WHY)
    from demo.gguf import convert, file_name

    path = folder / file_name(model, kind)
    if not path.exists():
        convert(model, kind, path)
    return path


def load(path, **settings):
    """Return what a verify service loads, and the model, not warmed up."""
    from flyspec.engine.llama_cpp.loading import load as load_gguf

    chosen = {"max_sessions": 4, "max_model_len": 512, "threads": 1, **settings}
    return load_gguf(VerifySettings(model=str(path), **chosen))
