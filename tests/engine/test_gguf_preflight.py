"""GGUF files before anything is loaded: recognised by name, refused with what to change."""

import signal
from subprocess import CompletedProcess

import pytest

from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.llama_cpp import probe
from flyspec.errors import ConfigError
from flyspec.model_files import gguf_path, is_gguf, served_name, weight_bytes
from flyspec.preflight import gguf as preflight
from tests.engine.gguf_models import WHY, needs_llama_cpp


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.Q8_0.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    return path


@pytest.fixture
def installed(monkeypatch):
    """As if the packages were there, and worked."""
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())


def test_a_file_and_a_directory_of_one_are_recognised(file):
    assert is_gguf(str(file))
    assert is_gguf(str(file.parent))
    assert gguf_path(str(file.parent)) == file
    assert served_name(str(file)) == "small.Q8_0"
    assert weight_bytes(str(file)) == 64
    (file.parent / "config.json").write_text("{}")
    assert not is_gguf(str(file.parent))
    assert not is_gguf("owner/name")


def test_parts_are_one_model_and_two_models_are_refused(file):
    for part in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (file.parent / part).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="has 2 GGUF models"):
        gguf_path(str(file.parent))
    file.unlink()
    assert gguf_path(str(file.parent)).name == "big-00001-of-00002.gguf"


def test_what_is_no_gguf_file_is_refused(file):
    with pytest.raises(ConfigError, match=r"no such file or directory \(did you mean .*Q8_0"):
        gguf_path(str(file.with_name("small.Q9_0.gguf")))
    file.write_bytes(b"GGML and more")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        gguf_path(str(file))


def test_without_the_packages_the_error_says_what_to_install(file, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs llama-cpp-python and gguf: pip install '"):
        preflight.serves_gguf(VerifySettings(model=str(file)))


@pytest.mark.usefixtures("installed")
def test_a_llama_cpp_that_crashes_is_refused_before_weights_are_read(file, monkeypatch):
    ended = CompletedProcess([], -signal.SIGILL)
    monkeypatch.setattr(preflight.subprocess, "run", lambda *args, **kwargs: ended)
    preflight.crash.cache_clear()
    with pytest.raises(ConfigError, match=r"crashes on this processor \(SIGILL.*-mno-amx-tile"):
        preflight.serves_gguf(VerifySettings(model=str(file)))
    preflight.crash.cache_clear()


@needs_llama_cpp
def test_the_installed_llama_cpp_computes_a_quantised_product():
    pytest.importorskip("llama_cpp", reason=WHY)
    probe.main()


@pytest.mark.usefixtures("installed")
def test_other_settings_than_llama_cpp_knows_are_refused(file):
    assert preflight.serves_gguf(VerifySettings(model=str(file)))
    assert preflight.serves_gguf(DraftSettings(model=str(file), engine="llama-cpp"))
    for wrong in (
        {"dtype": "float32"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"batch_invariant": True},
        {"autojudge_file": "judge.safetensors"},
    ):
        (name,) = wrong
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{flag}.*: not for a GGUF file"):
            preflight.serves_gguf(VerifySettings(model=str(file), **wrong))
    with pytest.raises(ConfigError, match="--device banana"):
        preflight.serves_gguf(DraftSettings(model=str(file), device="banana"))


def test_flags_for_gguf_files_need_one(tmp_path):
    other = str(tmp_path)
    assert not preflight.serves_gguf(VerifySettings(model=other))
    with pytest.raises(ConfigError, match=r"--engine llama-cpp: .* is not a GGUF file"):
        preflight.serves_gguf(VerifySettings(model=other, engine="llama-cpp"))
    with pytest.raises(ConfigError, match="--n-gpu-layers 3: is for GGUF files"):
        preflight.serves_gguf(DraftSettings(model=other, n_gpu_layers=3))
