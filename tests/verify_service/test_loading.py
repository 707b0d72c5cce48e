"""Model directories that cannot be served are refused with the reason, before anything listens."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flyspec.config import VerifySettings
from flyspec.engine import cache_size, loading
from flyspec.engine.device_memory import DeviceMemory
from flyspec.engine.loading import load_model
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError
from flyspec.model_files import check_model_files
from verify_service import server
from verify_service.ranks import load

WEIGHTS = "model.safetensors"


def _truncated(directory):
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def _without_the_head(directory):
    weights = load_file(directory / WEIGHTS)
    del weights["lm_head.weight"]
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def _configured(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _with_a_shared_id(directory):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    *_, last, own = vocabulary = tokenizer["model"]["vocab"]
    vocabulary[own] = vocabulary[last]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_with_a_shared_id, "tokenizer.json gives id [0-9]+ to both '.*' and '.*'"),
        (_truncated, "cannot be loaded"),
        (lambda d: (d / WEIGHTS).unlink(), "there is no model.safetensors"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda d: (d / "config.json").unlink(), "no config.json there"),
        (lambda d: _configured(d, hidden_size="wide"), "hidden_size"),
        (_without_the_head, "lm_head.weight"),
    ],
)
def test_a_damaged_model_is_refused(target_dir, tmp_path, damage, text):
    shutil.copytree(target_dir, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError, match=text):
        load_model(str(tmp_path / "model"), "cpu", "float32")


@pytest.mark.parametrize("layers", [3, 1e9])
def test_more_layers_than_the_weights_have_are_refused_from_the_files(target_dir, tmp_path, layers):
    model = shutil.copytree(target_dir, tmp_path / "model")
    _configured(model, num_hidden_layers=layers)
    with pytest.raises(ConfigError, match=f"num_hidden_layers {layers:,.0f}, but .* 2 layers"):
        check_model_files(str(model))
    weights = dict.fromkeys(load_file(model / WEIGHTS), WEIGHTS)
    (model / WEIGHTS).rename(model / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="2 layers"):
        check_model_files(str(model))
    _configured(model, num_hidden_layers=2)
    check_model_files(str(model))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "scale", "text"),
    [
        (UP, float("nan"), f"{UP} has values that are not finite"),
        ("lm_head.weight", 1e38, "its logits are not finite"),
    ],
)
def test_logits_that_are_not_finite_are_told_as_that(target_dir, tmp_path, name, scale, text):
    model = shutil.copytree(target_dir, tmp_path / "model")
    weights = load_file(model / WEIGHTS)
    weights[name] = weights[name].float() * scale
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
    loaded = load_model(str(model), "cpu", "float32")
    with pytest.raises(ConfigError, match=text) as refused:
        ModelRunner(loaded, num_slots=2).warm_up()
    assert "attention" not in str(refused.value)


def test_tied_weights_need_not_be_stored(target_dir, tmp_path):
    shutil.copytree(target_dir, tmp_path / "model")
    _without_the_head(tmp_path / "model")
    _configured(tmp_path / "model", tie_word_embeddings=True)
    assert load_model(str(tmp_path / "model"), "cpu", "float32").info.vocab_size == 400


def test_what_does_not_fit_is_refused_before_weights_are_read(target_dir, monkeypatch):
    monkeypatch.setattr(cache_size, "device_memory", lambda device: DeviceMemory(10**6, 4 * 10**5))
    monkeypatch.setattr(loading, "AutoModelForCausalLM", None)
    settings = VerifySettings(model=target_dir, device="cpu", dtype="float64")
    with pytest.raises(ConfigError, match=r"even one session fits on cpu: weights \d+.* kB \+ KV"):
        load(settings, None)


def test_a_length_beyond_the_models_is_refused_before_weights_are_read(target_dir, monkeypatch):
    monkeypatch.setattr(loading, "AutoModelForCausalLM", None)
    with pytest.raises(ConfigError, match="--max-model-len 9999999: the model's own limit is"):
        load_model(target_dir, "cpu", "float64", 9_999_999)


def test_weights_without_room_are_out_of_memory(target_dir, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ConfigError, match="out of memory while loading weights"):
        load_model(target_dir, "cpu", "float64")


def test_measuring_steps_without_room_is_out_of_memory(target_dir, monkeypatch):
    def full(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(server, "measure_steps", full)
    settings = VerifySettings(model=target_dir, device="cpu", dtype="float64", max_sessions=1)
    with pytest.raises(ConfigError, match=r"out of memory while warming up: .*2.00 GiB"):
        server.build(settings)
