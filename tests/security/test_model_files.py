"""A checkpoint never runs code: neither its own nor from pickles, whatever its files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flyspec.engine.loading import load_model
from flyspec.errors import ConfigError
from tests.tiny import make_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()
"""
AUTO_MAP = {
    "AutoConfig": "code.LlamaConfig",
    "AutoModelForCausalLM": "code.LlamaForCausalLM",
    "AutoTokenizer": ["code.PreTrainedTokenizerFast", "code.PreTrainedTokenizerFast"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return Path(make_model(tmp_path_factory.mktemp("model") / "whole", seed=1))


@pytest.fixture
def model(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def configure(model: Path, file: str = "config.json", **values) -> None:
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class Spiteful:
    """Unpickling it runs code."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (Path(self.path).touch, ())


def pickle_weights(model: Path) -> list[str]:
    """Write the weights, and something that runs code, to a pickle; return the weights' names."""
    weights = load_file(model / WEIGHTS)
    torch.save({**weights, "x": Spiteful(model / "ran")}, model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    return list(weights)


def write_index(model: Path, names: list[str], file: str, index: str = INDEX) -> None:
    (model / index).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)})
    )


def refused(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(str(model), "cpu", "float32")
    assert not (model / "ran").exists()
    return str(caught.value)


def test_pickles_are_not_read(model):
    names = pickle_weights(model)
    assert f"there is no {WEIGHTS} and no {INDEX}, only pytorch_model.bin; only" in refused(model)
    write_index(model, names, "pytorch_model.bin")
    assert f"{INDEX} names 'pytorch_model.bin'; only safetensors weights are" in refused(model)
    configure(model, transformers_weights="adapter_model.bin")
    assert "its configuration names 'adapter_model.bin'" in refused(model)
    configure(model, transformers_weights="other.safetensors.index.json")
    write_index(model, names, "pytorch_model.bin", "other.safetensors.index.json")
    assert "other.safetensors.index.json names 'pytorch_model.bin'" in refused(model)


def test_an_index_leads_to_no_other_folder(model):
    weights = list(load_file(model / WEIGHTS))
    shutil.move(model / WEIGHTS, model.parent / WEIGHTS)
    write_index(model, weights, f"../{WEIGHTS}")
    assert f"names '../{WEIGHTS}'" in refused(model)
    (model / INDEX).write_text("[]")
    assert f"{INDEX} cannot be read" in refused(model)


def test_shards_are_read(model):
    weights = list(load_file(model / WEIGHTS))
    shutil.move(model / WEIGHTS, model / "model-00001-of-00001.safetensors")
    write_index(model, weights, "model-00001-of-00001.safetensors")
    assert load_model(str(model), "cpu", "float32").info.vocab_size


def test_code_that_comes_with_a_model_is_not_run(model):
    (model / "code.py").write_text(CODE)
    configure(model, auto_map=AUTO_MAP)
    configure(model, "tokenizer_config.json", auto_map=AUTO_MAP)
    # An architecture that transformers has is served by transformers' own code.
    assert load_model(str(model), "cpu", "float32").info.vocab_size
    assert not (model / "ran").exists()
    configure(model, model_type="brand-new")
    assert "requires custom code (auto_map), which is never run" in refused(model)


def test_code_of_a_tokenizer_is_not_run_either(model):
    (model / "code.py").write_text(CODE)
    configure(
        model, "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="BrandNewTokenizer"
    )
    assert "requires custom code (auto_map)" in refused(model)
