"""Model directories that cannot be served: refused with what is wrong, before anything listens."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from flyspec.engine.loading import load_model
from flyspec.errors import ConfigError

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


@pytest.mark.parametrize(
    ("damage", "text"),
    [
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


def test_tied_weights_need_not_be_stored(target_dir, tmp_path):
    shutil.copytree(target_dir, tmp_path / "model")
    _without_the_head(tmp_path / "model")
    _configured(tmp_path / "model", tie_word_embeddings=True)
    assert load_model(str(tmp_path / "model"), "cpu", "float32").info.vocab_size == 400
